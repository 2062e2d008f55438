"""Whether there is a compiled reader, and that nobody fares worse where there is none."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from loadgen.wire import compiled_reader
from loadgen.wire.poller import new_poller
from tests.loadgen.readers import use_reader
from workloads.request import WorkloadError


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty cache of the user's, and a process that has not looked yet."""
    monkeypatch.delenv(compiled_reader.VARIABLE, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    compiled_reader._library.cache_clear()
    yield tmp_path / "cache"
    compiled_reader._library.cache_clear()


def a_compiler(folder: Path, script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The only compiler there is: a shell script."""
    folder.mkdir()
    cc = folder / "cc"
    cc.write_text(f"#!/bin/sh\n{script}\n")
    cc.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")


def the_reader() -> str:
    poller = new_poller()
    try:
        return compiled_reader.new_reader(poller).name
    finally:
        poller.close()


def test_without_a_compiler_python_reads(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "no C compiler" in str(compiled_reader.library())
    assert the_reader() == compiled_reader.reader_name() == "python"


BROKEN = [
    ("echo 'cannot find stdio.h' >&2; exit 1", "cannot find stdio.h"),
    ('while [ "$1" != -o ]; do shift; done; echo rubbish > "$2"', "invalid ELF header"),
    ("exit 0", "No such file"),
]


@pytest.mark.parametrize(("script", "why"), BROKEN, ids=["fails", "writes rubbish", "writes nothing"])
def test_with_a_broken_compiler_python_reads(
    script: str, why: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    a_compiler(tmp_path / "bin", script, monkeypatch)
    found = compiled_reader.library()
    if "64 bits" in str(found):
        pytest.skip(str(found))
    assert why in str(found) or "file too short" in str(found)
    assert the_reader() == "python"
    monkeypatch.setenv(compiled_reader.VARIABLE, "compiled")
    with pytest.raises(WorkloadError, match="there is no compiled reader"):
        compiled_reader.library()


def test_with_a_cache_that_cannot_be_written_python_reads(cache: Path) -> None:
    cache.write_text("a file where the folder should be")
    assert isinstance(compiled_reader.library(), str)
    assert the_reader() == "python"


def test_python_reads_where_it_is_asked_to(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    monkeypatch.setenv(compiled_reader.VARIABLE, "python")
    assert the_reader() == compiled_reader.reader_name() == "python"
    assert not cache.exists()


def test_an_unknown_reader_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(compiled_reader.VARIABLE, "rust")
    with pytest.raises(WorkloadError, match="BURSTLINE_READER=rust: expected python or compiled"):
        compiled_reader.library()


def test_a_library_is_kept_and_found_again(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    use_reader("compiled", monkeypatch)
    [kept] = (cache / "burstline" / "reader").iterdir()
    written_ns = kept.stat().st_mtime_ns
    compiled_reader._library.cache_clear()
    assert the_reader() == "compiled"
    assert [path.stat().st_mtime_ns for path in kept.parent.iterdir()] == [written_ns]


def test_a_library_that_a_power_cut_left_empty_is_compiled_again(
    monkeypatch: pytest.MonkeyPatch, cache: Path
) -> None:
    use_reader("compiled", monkeypatch)
    [kept] = (cache / "burstline" / "reader").iterdir()
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache / "another"))
    empty = cache / "another" / "burstline" / "reader" / kept.name
    empty.parent.mkdir(mode=0o700, parents=True)
    empty.touch()
    compiled_reader._library.cache_clear()
    assert the_reader() == "compiled"
    assert empty.stat().st_size == kept.stat().st_size


def test_what_others_may_have_put_into_the_cache_is_not_run(cache: Path) -> None:
    if isinstance(why := compiled_reader.library(), str):
        pytest.skip(why)
    folder = cache / "burstline" / "reader"
    assert folder.stat().st_mode & 0o777 == 0o700
    folder.chmod(0o777)
    compiled_reader._library.cache_clear()
    assert "is not this user's alone" in str(compiled_reader.library())
    assert the_reader() == "python"


def test_two_processes_that_compile_at_once_both_read_with_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, cache: Path
) -> None:
    use_reader("compiled", monkeypatch)
    [library] = (cache / "burstline" / "reader").iterdir()
    # Each waits for the other in the middle of compiling.
    meets = "while [ $(ls | wc -l) -lt 2 ]; do sleep 0.01; done"
    writes = f'while [ "$1" != -o ]; do shift; done; cd {tmp_path}/met; touch $$; {meets}; cp {library} "$2"'
    (tmp_path / "met").mkdir()
    a_compiler(tmp_path / "bin", writes, monkeypatch)
    code = "from loadgen.wire.compiled_reader import reader_name; print(reader_name())"
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    processes = [
        subprocess.Popen([sys.executable, "-c", code], env=env, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    assert [process.communicate(timeout=30)[0] for process in processes] == ["compiled\n"] * 2
    assert len(list((tmp_path / "met").iterdir())) == 2
    assert len(list(library.parent.iterdir())) == 2
