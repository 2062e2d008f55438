"""The command itself: what it prints and how it ends."""

import contextlib
import io
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from burstline.bench.server_session import check_model
from burstline.cli import VERBS, main
from burstline.console import memory_limits
from burstline.console.stdout import json_text, outlets
from burstline.servers.host import kernel
from burstline.servers.host.child import BLAS_THREADS
from burstline.servers.registry import ENGINES
from burstline.workloads.request import WorkloadError

BOUND = ["bound", "--model", "llama-2-7b", "--device", "a100"]


def code_of(argv):
    """The exit code, whether the command returns it or argparse exits with it."""
    try:
        return main(argv)
    except SystemExit as ended:
        return ended.code


def test_help_lists_every_verb_and_imports_nothing_heavy():
    code = "import sys; from burstline.cli import main; main(['--help']); print([m for m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert all(f"  {verb} " in done.stdout for verb in VERBS)
    assert not {"numpy", "pandas", "httpx", "rich", "matplotlib"} & set(done.stdout.split("'"))


def test_a_model_that_is_not_there_is_refused_by_the_embedded_engine_before_it_starts(
    capsys, tmp_path, monkeypatch
):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)  # there is another refusal
    monkeypatch.setattr("burstline.servers.engines.vllm.Vllm.installed", lambda *_: None)
    assert code_of(["run", "--model", "models/none", "--out", str(tmp_path / "runs")]) == 2
    assert "reads no other model" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


def test_no_verb_is_a_usage_error_and_shows_the_help(capsys):
    assert main([]) == 2
    assert "usage" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["fly"], "expected one of: run, "),
        (["run", "--engine", "warp"], "reference"),
        (["run", "--requests", "0"], "--requests 0"),
        (["run", "--requests", "many"], "--requests"),
        (["run", "--model", "/nowhere/at/all"], "not a folder"),
        (
            ["run", "--engine", "reference", "--model", "models/nowhere"],
            "--model models/nowhere is not a folder",
        ),
        (["run", "--url", "localhost"], "--url"),
        (["run", "--engine", "vllm"], "--model DIR"),
        (["run", "--requests", "9999999"], "ulimit"),
        (["run", "--port", "99999"], "expected 1 to 65535"),
        (["run", "--concurrency", "4", "--rate", "3"], "give one or the other"),
        (["run", "--concurrency", "4", "--max-rate", "3"], "--rate"),
        (["run", "--duration-s", "10"], "--duration-s"),
        (["run", "/nowhere.toml"], "No such file or directory; expected a suite"),
        (["make-model", "/dev/null/model", "--like", "tiny"], "/dev/null/model: Not a directory"),
        (["run", "--out", "/dev/null/runs"], "/dev/null/runs"),
        (["report", "--format", "text", "/nowhere"], "not a run"),
        (["report", "/nowhere"], "not a run"),
        (["calibrate", "--out", "/"], "--out / is a folder; expected a file"),
        (["calibrate", "--out", "/dev/null/cpu.toml"], "--out /dev/null/cpu.toml: "),
    ],
)
def test_a_users_mistake_gets_one_clear_line_and_exit_code_two(argv, words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert code_of(argv) == 2
    said = capsys.readouterr().err
    assert words in said
    assert len(said.splitlines()) <= 2
    assert not list(tmp_path.iterdir())


def test_a_model_folder_without_a_config_is_named(tmp_path, capsys):
    assert code_of(["run", "--engine", "reference", "--model", str(tmp_path)]) == 2
    assert "has no config.json" in capsys.readouterr().err


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_explains_itself(verb, capsys):
    assert code_of([verb, "--help"]) == 0
    assert f"usage: burstline {verb}" in capsys.readouterr().out


def test_a_port_that_is_taken_is_a_usage_error_that_names_it(capsys):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = str(listener.getsockname()[1])
        assert code_of(["run", "--engine", "reference", "--port", port]) == 2
    assert f"--port {port}" in capsys.readouterr().err


@pytest.fixture
def left(monkeypatch):
    """Standard output into a pipe whose reader has left."""
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w", buffering=1) as stream:  # noqa: PTH123
        monkeypatch.setattr(sys, "stdout", stream)
        yield


@pytest.mark.parametrize(
    ("argv", "code"), [([], 2), (BOUND, 0), (["report", "--format", "text", "/nowhere"], 2)]
)
def test_a_reader_who_leaves_changes_no_exit_code(left, argv, code):
    assert code_of(argv) == code


@pytest.mark.parametrize("argv", [["--help"], [*BOUND, "--json"]])
def test_a_reader_who_leaves_is_not_complained_of_when_python_ends(argv):
    command = [sys.executable, "-m", "burstline", *argv]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert (process.stderr.read(), process.wait(60)) == (b"", 0)


LOST = b"burstline: standard output could not be written: No space left on device; make room, or write it"


@pytest.mark.parametrize(("argv", "code", "said"), [(["--help"], 0, b""), (BOUND, 2, LOST)])
def test_a_full_disk_is_told_where_what_is_printed_is_the_result(argv, code, said):
    with open("/dev/full", "w") as full:  # noqa: PTH123
        done = subprocess.run([sys.executable, "-m", "burstline", *argv], stdout=full, stderr=subprocess.PIPE)
    assert done.returncode == code
    assert done.stderr.startswith(said)
    assert len(done.stderr.splitlines()) == bool(said)


@pytest.mark.parametrize(("argv", "code"), [("--help", 0), ("fly", 2)])
def test_a_command_without_outputs_ends_with_the_same_exit_code(argv, code):
    closed = ["sh", "-c", 'exec "$@" >&- 2>&-', "sh"]
    assert subprocess.run([*closed, sys.executable, "-m", "burstline", argv], check=False).returncode == code


def test_a_run_begins_without_what_only_its_end_needs():
    code = "import sys, burstline.bench.run; print(*sys.modules)"
    loaded = set(subprocess.check_output([sys.executable, "-c", code], text=True).split())
    assert "burstline.loadgen.driver.job" in loaded
    assert not {"matplotlib", "pandas", "scipy"} & loaded


def test_what_a_terminal_has_no_letters_for_is_escaped_and_json_needs_none():
    terminal = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    with contextlib.redirect_stdout(terminal), outlets():
        print("64 → 6 т")
    assert terminal.buffer.getvalue() == b"64 -> 6 \\u0442\n"
    assert json_text({"a": "→", "b": float("nan")}) == '{\n  "a": "\\u2192",\n  "b": null\n}'


def test_a_name_that_is_not_in_the_hubs_cache_is_refused_where_the_hub_may_not_be_asked(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(WorkloadError, match="HF_HUB_OFFLINE is set"):
        check_model("org/nowhere")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    check_model("org/nowhere")  # the engine asks the hub
    check_model("reference", ENGINES["reference"])


@pytest.mark.parametrize(
    ("argv", "near"),
    [
        (["reprot"], "did you mean report?"),
        (["run", "--concurency", "3"], "did you mean --concurrency?"),
        (["run", "--conc", "3"], "unrecognized arguments: --conc"),
    ],
)
def test_a_slip_gets_the_nearest_word_and_no_flag_may_be_cut_short(argv, near, capsys):
    assert code_of(argv) == 2
    assert near in capsys.readouterr().err


def test_the_help_of_a_run_is_short_and_the_whole_help_is_there_too(capsys):
    def flags(argv):
        assert code_of(argv) == 0
        return set(re.findall(r"^ +(?:-\w, )?(--[a-z-]+)", capsys.readouterr().out, re.MULTILINE))

    brief, whole = flags(["run", "--help"]), flags(["run", "--help-all"])
    assert len(brief) <= 18
    assert brief < whole
    assert len(whole) > 40


def _limited(kb):
    """`burstline compare` in so much address space."""
    line = f"ulimit -v {kb}; exec {sys.executable} -P -m burstline compare"
    return subprocess.run(["sh", "-c", line], capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize("kb", [500_000, 700_000, 800_000])
def test_too_little_address_space_is_one_line_before_anything_is_imported(kb):
    done = _limited(kb)
    assert done.returncode == 2
    said = f"limited to {kb >> 10:,} MiB (ulimit -v {kb}), but 900 MiB are needed"
    assert done.stderr.startswith(f"burstline: the address space is {said}")
    assert len(done.stderr.splitlines()) == 1


def test_numpy_starts_one_thread_where_the_address_space_has_no_room_for_all(monkeypatch):
    monkeypatch.delenv(BLAS_THREADS, raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    monkeypatch.setattr(memory_limits.resource, "getrlimit", lambda _: (1_500_000 << 10, -1))
    assert memory_limits.refusal() is None
    assert os.environ[BLAS_THREADS] == "1"


@pytest.mark.parametrize(
    ("line", "name"), [("0::/a/b", "memory.max"), ("4:memory:/a/b", "memory.limit_in_bytes")]
)
@pytest.mark.parametrize(
    ("limits", "mib"), [({"": 64, "a": 512}, 64), ({"a/b": 128}, 128), ({"a": 512}, None)]
)
def test_the_lowest_limit_of_the_control_groups_counts(line, name, limits, mib, tmp_path, monkeypatch):
    monkeypatch.setattr(kernel, "CGROUPS", tmp_path)
    monkeypatch.setattr(kernel, "GROUPS_OF_SELF", tmp_path / "self")
    (tmp_path / "self").write_text(f"9:cpu:/\n{line}\n")
    root = tmp_path / line.split(":")[1]
    (root / "a" / "b").mkdir(parents=True)
    (root / "a" / "b" / name).write_text("max\n")
    for group, limit in limits.items():
        (root / group / name).write_text(f"{limit << 20}\n")
    said = memory_limits.refusal()
    assert (said is None) == (mib is None)
    assert mib is None or said.startswith(f"the control group is limited to {mib} MiB of memory")


def test_a_place_in_a_container_of_ours_that_no_mount_holds_is_lost_with_it(monkeypatch, capsys):
    inside = Path("/no-mount-holds-this")
    assert not memory_limits.lost_with_container(inside)  # no container of our image
    monkeypatch.setenv("BURSTLINE_IN_IMAGE", "1")
    assert memory_limits.lost_with_container(inside)
    assert not memory_limits.lost_with_container(Path("/proc/self"))
    for words in (["run"], ["certify"], ["compare", "a", "b"], ["calibrate"]):
        assert main([*words, "--out", str(inside)]) == 2
        said = capsys.readouterr().err
        assert said.startswith(f"burstline: {inside} is inside this container and is gone with it")
        assert len(said.splitlines()) == 1
    monkeypatch.chdir("/")
    assert main(["run", "laptop", "--dry-run"]) == 0  # it writes nothing


def test_without_a_place_for_temporary_files_one_line_says_what_to_do(tmp_path, monkeypatch):
    def none() -> str:
        raise FileNotFoundError(2, "No usable temporary directory found")

    monkeypatch.setattr(memory_limits.tempfile, "gettempdir", none)
    assert "docker run --tmpfs /tmp" in (memory_limits.refusal() or "")


ASK_BASH = """
source "$1"; shift
COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); COMP_LINE="$*"; COMP_POINT=${#COMP_LINE}
words=($(complete -p burstline))
for k in ${!words[@]}; do
    [ "${words[k]}" = -F ] && "${words[k + 1]}" burstline "${!#}"
done
printf "%s\\n" "${COMPREPLY[@]}"
"""


def test_bash_completes_a_flag_of_a_verb_and_the_choices_of_a_flag(tmp_path, capsys):
    assert main(["--print-completion", "bash"]) == 0
    script = tmp_path / "burstline.bash"
    script.write_text(capsys.readouterr().out)

    def completed(*words):
        argv = ["bash", "-c", ASK_BASH, "bash", str(script), "burstline", *words]
        return subprocess.run(argv, capture_output=True, text=True, check=True).stdout.split()

    assert completed("run", "--max-nu") == ["--max-num-seqs", "--max-num-batched-tokens"]
    assert completed("report", "--format", "mark") == ["markdown"]
    assert completed("cal") == ["calibrate"]
    assert completed("run", "--engine", "llam") == ["llamacpp"]
    assert completed("serve", "transf") == ["transformers"]
    assert completed("run", "--device", "b200") == ["b200-sxm"]
    assert completed("bound", "--model", "deepseek-v3.") == ["deepseek-v3.2"]
    assert completed("study", "--device", "a100-sxm4-4") == ["a100-sxm4-40g"]


@pytest.mark.parametrize("shell", ["zsh", "tcsh"])
def test_other_shells_have_a_script(shell, capsys):
    assert main([f"--print-completion={shell}"]) == 0
    said = capsys.readouterr().out
    assert "--engine" in said if shell == "zsh" else "engine" in said
    assert ("_burstline_engines() { compadd vllm" in said) == (shell == "zsh")
