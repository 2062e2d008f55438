"""What each process of a run imports: these lists may only shrink, for each import delays every run.

What is not on a list and is imported all the same fails the test, and so does what is on it for no reason.
"""

from __future__ import annotations

import platform
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import pytest

from burstline.bench import conclusion
from burstline.machine import host_facts
from burstline.measure.record.rundir import open_run
from burstline.servers.registry import ENGINES
from tests.modules_probe.run import Loaded, loaded_by_a_run
from tests.truth.rig import truth_server
from tests.truth.script import Script

LOAD: Final = ("--requests", "8", "--prompt-tokens", "16", "--output-tokens", "3")
SLOW: Final = Script(ttft_s=1.5, gaps_s=(0.05,))

FOREIGN: Final[Mapping[tuple[str, str], frozenset[str]]] = {
    ("main", "load"): frozenset(
        {"dateutil", "huggingface_hub", "numpy", "orjson", "psutil", "pyarrow", "pynvml", "zstandard"}
    ),
    ("driver", "load"): frozenset({"numpy", "orjson", "zstandard"}),
    ("canary", "load"): frozenset(),
    ("watcher", "load"): frozenset({"orjson", "prometheus_client", "psutil", "pynvml"}),
    ("driver", "exit"): frozenset({"numpy", "orjson", "zstandard"}),
    ("watcher", "exit"): frozenset({"orjson", "prometheus_client", "psutil", "pynvml"}),
    ("keeper", "exit"): frozenset({"psutil"}),
}
"""By process and moment, the top names of all that is neither Burstline's nor the standard library's."""

MOST: Final[Mapping[tuple[str, str], int]] = {
    ("main", "load"): 490,
    ("driver", "load"): 360,
    ("canary", "load"): 150,
    ("watcher", "load"): 380,
    ("keeper", "exit"): 165,
    ("main", "exit"): 950,
}
"""Modules in all, a little above what CPython 3.11 needs: other versions divide theirs otherwise."""

HTTP: Final = {"httpx", "httpx2", "requests", "urllib3", "aiohttp"}
"""Stacks for HTTP, of which huggingface_hub 1 and 2 bring different ones (docs/decisions/0019)."""
NEVER: Final = {"asyncio_throttle", "pandas", "scipy.stats", "scipy.optimize", "matplotlib.pyplot", *HTTP}
NEVER_BEFORE_THE_REPORT: Final = NEVER | {
    "scipy",
    "matplotlib",
    "huggingface_hub.file_download",
    "tokenizers",
    "rich",
}


@pytest.fixture(scope="module")
def processes(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], Loaded]:
    """One run at a server that is there, and one that starts its own, for the keeper."""
    if sys.platform != "linux":
        pytest.skip("processes are asked through /proc")
    with truth_server(SLOW, thread=True) as truth:
        attached = loaded_by_a_run(truth, tmp_path_factory.mktemp("attached"), LOAD)
    started = loaded_by_a_run(None, tmp_path_factory.mktemp("started"), LOAD)
    keeper = [each for each in started if each.role == "keeper"]
    return {(each.role, each.moment): each for each in (*keeper, *attached)}


@pytest.mark.slow
@pytest.mark.parametrize(("role", "moment"), FOREIGN)
def test_a_process_imports_what_it_uses_and_no_more(
    processes: dict[tuple[str, str], Loaded], role: str, moment: str
) -> None:
    assert processes[role, moment].foreign == FOREIGN[role, moment]


@pytest.mark.slow
@pytest.mark.parametrize(("role", "moment"), MOST)
def test_a_process_imports_few_modules(
    processes: dict[tuple[str, str], Loaded], role: str, moment: str
) -> None:
    assert len(processes[role, moment].modules) <= MOST[role, moment]


@pytest.mark.slow
def test_nothing_that_only_the_report_needs_is_imported_before_the_last_token(
    processes: dict[tuple[str, str], Loaded],
) -> None:
    during = [each for (_, moment), each in processes.items() if moment == "load"]
    assert {each.role for each in during} == {"main", "driver", "canary", "watcher"}
    for each in during:
        assert not NEVER_BEFORE_THE_REPORT & each.modules, each.role


@pytest.mark.slow
def test_a_run_never_imports_what_frames_and_notebooks_need(
    processes: dict[tuple[str, str], Loaded],
) -> None:
    for each in processes.values():
        assert not NEVER & each.modules, each.role


@pytest.mark.slow
def test_of_an_audited_run_only_the_second_reader_imports_clients(tmp_path: Path) -> None:
    processes = loaded_by_a_run(None, tmp_path, (*LOAD, "--audit", "50%"))
    clients = {each.role: NEVER & each.modules for each in processes}
    assert {"httpx", "asyncio_throttle"} <= clients.pop("second reader") <= {"asyncio_throttle", *HTTP}
    assert clients.keys() >= {"main", "driver", "watcher", "keeper"}
    assert not set().union(*clients.values())


def test_frames_are_there_all_the_same_for_those_who_ask(tmp_path: Path) -> None:
    from burstline.measure.record.tables import keep_pandas_out, telemetry_table
    from burstline.servers.host.telemetry import Row

    keep_pandas_out()
    frame = telemetry_table([Row(5, "server", "rss_bytes", None, "gone")]).to_pandas()
    assert frame["value"].isna().tolist() == [True]


@pytest.mark.usefixtures("without_page")
def test_the_answer_is_there_before_the_page_is_made(burst_run, tmp_path, monkeypatch, capsys) -> None:
    run, before = open_run(shutil.copytree(burst_run.path, tmp_path / "run")), []
    monkeypatch.setattr(conclusion, "decode_run", lambda *_: burst_run.record_table)
    monkeypatch.setattr(
        "burstline.reports.page.page.render", lambda _: before.append(capsys.readouterr().out) or ""
    )
    conclusion.conclude(run, ENGINES[burst_run.manifest.engine], answer=True)
    (answer,) = before
    assert "Served " in answer
    assert "TTFT" in answer
    assert capsys.readouterr().out == ""


@pytest.mark.slow
def test_an_answer_needs_nothing_of_the_pages() -> None:
    code = "import sys, burstline.bench.conclusion; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"matplotlib", "jinja2", "burstline.reports.page.page"} & set(done.stdout.split())


def test_a_version_of_an_installed_package_takes_no_process(monkeypatch, tmp_path: Path) -> None:
    def refuse(*argv: object, **_: object) -> None:
        raise AssertionError(argv)

    monkeypatch.setattr(host_facts, "__file__", str(tmp_path / "burstline" / "machine" / "host_facts.py"))
    monkeypatch.setattr(subprocess, "Popen", refuse)
    monkeypatch.setenv("BURSTLINE_COMMIT", "abc")
    assert host_facts.commit.__wrapped__() == "abc"
    assert platform.release() in host_facts.system()
