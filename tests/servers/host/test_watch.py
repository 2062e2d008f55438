import os
import re
import resource
import signal
import socket
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from burstline.servers.engines.vllm import Vllm
from burstline.servers.host import process, watch
from burstline.servers.host.ready import wait_ready
from burstline.servers.host.serving import UNKNOWN, ServingProcesses
from burstline.servers.host.sources import ProcessTree
from burstline.servers.host.telemetry import LineFile, Row, as_lines, load_telemetry, missing, rows_of
from burstline.servers.host.watch import DISK_FULL, Watcher, WatchTask
from burstline.servers.launch import Launch
from burstline.servers.messages import Target
from burstline.servers.redact import learn

FAKE = str(Path(__file__).with_name("fake_server.py"))
ROOT = Path(__file__).parents[3]
LINUX = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
MB = 10**6


def eventually(condition: Callable[[], object], within_s: float = 20.0) -> bool:
    deadline = time.monotonic() + within_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def by_name(rows: list[Row]) -> dict[tuple[str, str], list[Row]]:
    grouped = defaultdict(list)
    for row in rows:
        grouped[row.source, row.name].append(row)
    return dict(grouped)


def python(code: str) -> subprocess.Popen[str]:
    """A child that runs `code`, then says so and waits for its input to end."""
    code += "\nimport sys; print('done', flush=True); sys.stdin.read()"
    return subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


def when_done(child: subprocess.Popen[str]) -> None:
    assert child.stdout is not None
    assert child.stdout.readline() == "done\n"


@LINUX
def test_a_full_disk_costs_a_line_file_what_found_no_room_and_no_more(tmp_path: Path) -> None:
    file = LineFile(Path("/dev/full"))
    file.write(b"one\n")
    assert file.failure == "No space left on device"
    file.close()
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    lines = LineFile(tmp_path / "lines")
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (20, before[1]))  # cuts a write, as a disk does
        lines.write(b"123456789012\n")
        assert lines.failure is None
        lines.write(b"cut in its middle\n")
        lines.write(b"short\n")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, ignored)
    assert (tmp_path / "lines").read_bytes() == b"123456789012\nshort\n"
    assert lines.failure == "No space left on device"
    lines.close()


@LINUX
def test_a_watcher_on_a_full_disk_goes_on_says_nothing_and_ends_with_its_code(
    capfd: pytest.CaptureFixture[str],
) -> None:
    target = Target(f"http://127.0.0.1:{process.free_port()}", "m")
    with Watcher().watch(
        WatchTask(Path("/dev/full"), engine="vllm", target=target, period_s=0.01)
    ) as watcher:
        assert eventually(lambda: psutil.Process(watcher.pid).nice() > 0)  # it has its task
        time.sleep(0.3)
        assert watcher._child.exit_code is None
    assert watcher._child.exit_code == DISK_FULL
    assert capfd.readouterr().err == ""


def test_rows_survive_the_file_and_a_line_cut_by_a_kill_is_left_out(tmp_path: Path) -> None:
    rows = [*rows_of("server", {"rss_bytes": 1.5e9, "cpu_s": 0.25}, at_ns=7), missing("gpu", "no NVML")]
    (tmp_path / "t").write_bytes(as_lines(rows) + as_lines(rows)[:20])
    assert load_telemetry(tmp_path / "t") == rows
    assert rows[2].value is None
    assert rows[2].note == "no NVML"


def test_cpu_time_counts_from_when_a_tree_is_made_and_outlives_its_processes() -> None:
    burn = "import time\nwhile time.process_time() < 0.4: pass"
    with python(burn) as before:
        when_done(before)
        tree = ProcessTree()
        tree._since = time.time() + 10  # as if the process were much older than the tree
        tree.adopt([before.pid])
        assert tree.read()["cpu_s"] < 0.2
    tree = ProcessTree()
    with python(burn) as after:
        tree.adopt([after.pid])
        when_done(after)
        assert 0.35 < tree.read()["cpu_s"] < 2
        assert tree.pss_bytes() is None or tree.pss_bytes() > 0
    assert eventually(lambda: tree.read()["n_processes"] == 0)
    assert 0.35 < tree.read()["cpu_s"] < 2
    assert tree.read()["rss_bytes"] == 0


def test_a_run_is_watched_from_beside_it(tmp_path: Path) -> None:
    port = process.free_port()
    target = Target(f"http://127.0.0.1:{port}", "m")
    launch = Launch((sys.executable, FAKE, "serves", str(port)))
    path = tmp_path / "telemetry.jsonl"
    with process.start(launch, tmp_path / "log") as server:
        wait_ready(Vllm(), server, target)
        began_ns = time.monotonic_ns()
        with (
            Watcher().watch(
                WatchTask(
                    path, ServingProcesses(server.keeper_pid), engine="vllm", target=target, period_s=0.1
                )
            ) as w,
            python("import time") as client,
        ):
            w.add_clients([client.pid])
            assert eventually(lambda: path.exists() and seen_with_client(path))
        w.stop()
        server_rss = psutil.Process(server.pid).memory_info().rss
    ended_ns = time.monotonic_ns()
    rows = load_telemetry(path)
    named = by_name(rows)
    assert all(began_ns < row.at_ns < ended_ns for row in rows)
    assert named["server", "n_processes"][-1].value == 1
    assert named["server", "rss_bytes"][-1].value == pytest.approx(server_rss, rel=0.2)
    assert named["engine", "generation_tokens"][0].value == 450
    assert named["engine", "kv_used_fraction"][0].value == 0
    assert named["watcher", "cpu_s"][-1].value > 0
    host = [named["host", name][-1].value for name in ("busy_s", "others_cpu_s", "steal_s")]
    assert all(value is not None and value >= 0 for value in host)
    if sys.platform == "linux":
        assert len(named["server", "pss_bytes"]) == 1
    for source in ("pressure", "cgroup", "gpu"):
        found = [row for row in rows if row.source.startswith(source)]
        assert found
        assert all(row.value is not None or row.note for row in found)


GROWING = """
import socket, sys, time
listener = socket.create_server(("127.0.0.1", int(sys.argv[1])))
held = bytearray(80_000_000)
print("up", flush=True)
until = time.monotonic() + 30
while time.monotonic() < until:
    pass
"""


@LINUX
def test_a_server_that_runs_already_is_watched_and_when_it_has_ended_no_zero_is_written(
    tmp_path: Path,
) -> None:
    port, path = process.free_port(), tmp_path / "telemetry.jsonl"
    argv = [sys.executable, "-c", GROWING, str(port)]
    with subprocess.Popen(argv, stdout=subprocess.PIPE) as server:
        assert server.stdout is not None
        server.stdout.readline()
        found = ServingProcesses.at(f"http://127.0.0.1:{port}")
        with Watcher().watch(WatchTask(path, found, period_s=0.05)) as watcher:
            assert eventually(lambda: path.exists() and cpu_of_server(path) > 0.3)
            rollup = Path(f"/proc/{server.pid}/smaps_rollup").read_text()
            server.kill()
            server.wait()
            n = len(path.read_bytes())
            assert eventually(lambda: len(path.read_bytes()) > n + 5_000)
            watcher.stop()
    named = by_name(load_telemetry(path))
    values = [row.value for row in named["server", "rss_bytes"]]
    assert min(values) > 80 * MB
    busy, others = (named["host", name][-1].value or 0.0 for name in ("busy_s", "others_cpu_s"))
    assert busy - others > 0.9 * (named["server", "cpu_s"][-1].value or 0.0), "its own time is not foreign"
    assert max(values) == pytest.approx(1024 * int(re.findall(r"Rss: +(\d+)", rollup)[0]), rel=0.02)
    assert ("server", "*") not in named


def cpu_of_server(path: Path) -> float:
    return max((row.value for row in by_name(load_telemetry(path)).get(("server", "cpu_s"), [])), default=0.0)


@LINUX
def test_a_relay_that_shows_itself_in_the_load_was_no_server_from_the_start(tmp_path: Path) -> None:
    path, port = tmp_path / "telemetry.jsonl", process.free_port()
    with socket.create_server(("127.0.0.1", 0)) as upstream:
        at = upstream.getsockname()[1]
        code = (
            f"import socket; l = socket.create_server(('127.0.0.1', {port})); print('done', flush=True)\n"
            f"a = l.accept(), socket.create_connection(('127.0.0.1', {at}))"
        )
        with python(code.replace("print('done', flush=True)", "print('up', flush=True)")) as relay:
            assert relay.stdout is not None
            relay.stdout.readline()
            found = ServingProcesses.at(f"http://127.0.0.1:{port}")
            with Watcher().watch(WatchTask(path, found, period_s=0.02)):
                assert eventually(
                    lambda: path.exists() and ("server", "rss_bytes") in by_name(load_telemetry(path))
                )
                with socket.create_connection(("127.0.0.1", port)):
                    when_done(relay)
                    assert eventually(lambda: ("server", "*") in by_name(load_telemetry(path)))
    server = [row for row in load_telemetry(path) if row.source == "server"]
    assert [row.note for row in server] == [
        f"the server is not watched: what listens there talks to 127.0.0.1:{at}"
    ]


def seen_with_client(path: Path) -> bool:
    named = by_name(load_telemetry(path))
    clients = [row.value for row in named.get(("client", "n_processes"), [])]
    return 1 in clients and ("engine", "running") in named


def test_a_server_without_metrics_or_known_processes_is_recorded_as_such(tmp_path: Path) -> None:
    path = tmp_path / "telemetry.jsonl"
    dead = Target(f"http://127.0.0.1:{process.free_port()}", "m")
    with Watcher().watch(WatchTask(path, engine="vllm", target=dead, clients=(os.getpid(),))):
        assert eventually(lambda: path.exists() and ("engine", "*") in by_name(load_telemetry(path)))
    named = by_name(load_telemetry(path))
    assert [row.note for row in named["server", "*"]] == [UNKNOWN.unknown]
    assert [row.value for row in named["engine", "*"]] == [None]
    assert named["client", "rss_bytes"][0].value > 0


def test_what_was_written_before_a_kill_loads_and_the_kill_is_recorded(tmp_path: Path) -> None:
    path = tmp_path / "telemetry.jsonl"
    watcher = Watcher().watch(WatchTask(path, period_s=0.05))
    assert eventually(lambda: path.exists() and len(load_telemetry(path)) > 30)
    os.kill(watcher.pid, signal.SIGKILL)
    watcher.stop()
    assert load_telemetry(path)[-1].note == "the watcher was killed by signal 9 (often: out of memory)"


@pytest.fixture
def deaf() -> Iterator[Target]:
    """A server that answers nothing: its watcher waits for 5 s."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield Target(f"http://127.0.0.1:{listener.getsockname()[1]}", "m")


@pytest.mark.parametrize(
    ("limit", "how"),
    [("SILENT_S", "was killed by signal 9 (often: out of memory)"), ("STOP_S", "ended with exit code 1")],
)
def test_a_watcher_that_does_not_end_is_ended_and_that_is_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, deaf: Target, limit: str, how: str
) -> None:
    monkeypatch.setattr(watch, limit, 0.3)
    path = tmp_path / "telemetry.jsonl"
    watcher = Watcher().watch(WatchTask(path, engine="vllm", target=deaf, period_s=0.05))
    assert eventually(path.exists)
    watcher.stop()
    assert load_telemetry(path)[-1].note == f"the watcher {how}"


def test_a_watcher_that_still_writes_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, ends_s = tmp_path / "telemetry.jsonl", time.monotonic() + 0.5
    monkeypatch.setattr(watch, "SILENT_S", 0.3)

    class Writing:
        """A child that writes for half a second, then ends."""

        def ask_to_end(self) -> None: ...

        @property
        def exit_code(self) -> int | None:
            with path.open("ab") as file:
                file.write(b"x")
            return None if time.monotonic() < ends_s else 0

        def end(self, grace_s: float) -> int:
            return -9 if self.exit_code is None else 0

        def how_it_ended(self) -> str:
            return "was killed"

    watcher = Watcher()
    watcher._child.end()
    watcher._path, writing = path, Writing()
    monkeypatch.setattr(watcher, "_child", writing)
    watcher.stop()
    assert path.read_bytes().strip(b"x") == b"", "no kill is recorded"


def test_the_baseline_of_a_watcher_that_is_gone_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    watcher = Watcher().watch(WatchTask(tmp_path / "telemetry.jsonl"))
    os.kill(watcher.pid, signal.SIGKILL)
    os.waitid(os.P_PID, watcher.pid, os.WEXITED | os.WNOWAIT)
    monkeypatch.setattr(watch, "BASELINE_S", 600.0)
    waits = iter(range(500))
    monkeypatch.setattr(watch.time, "sleep", lambda _: next(waits))
    assert not watcher.await_baseline()
    watcher.stop()


@pytest.mark.usefixtures("fresh")
def test_a_secret_that_a_server_quotes_to_the_watcher_is_in_no_row(tmp_path: Path) -> None:
    learn("SECRETKEY12345678")
    path = tmp_path / "telemetry.jsonl"
    with socket.create_server(("127.0.0.1", 0)) as listener:
        target = Target(f"http://127.0.0.1:{listener.getsockname()[1]}", "m")
        with Watcher().watch(WatchTask(path, engine="vllm", target=target)):
            listener.settimeout(20)
            accepted, _ = listener.accept()
            with accepted:
                accepted.recv(1 << 16)
                accepted.sendall(b"HTTP/1.1 200 OK\r\n\r\nvllm:num_requests_running{} SECRETKEY12345678\n")
            listener.close()
            assert eventually(lambda: path.exists() and ("engine", "*") in by_name(load_telemetry(path)))
    assert "/metrics cannot be read: " in path.read_text()
    assert "SECRETKEY12345678" not in path.read_text()


PARENT = """
import sys, time
from pathlib import Path
from burstline.servers.host.watch import Watcher, WatchTask
print(Watcher().watch(WatchTask(Path(sys.argv[1]))).pid, flush=True)
time.sleep(600)
"""


def test_what_a_source_lacks_is_written_once() -> None:
    each, rows = object.__new__(watch.Watch), list[Row]()
    each._complained, each._write = set(), rows.extend
    for why in ("no NVML", "no NVML", "no power"):
        each._complain("gpu", why)
    assert [row.note for row in rows] == ["no NVML", "no power"]


def test_a_watcher_that_was_never_told_what_to_watch_ends_quietly(capfd: pytest.CaptureFixture[str]) -> None:
    watcher = Watcher()
    watcher.stop()
    assert watcher._child.exit_code == 0
    assert capfd.readouterr().err == ""


def test_the_watcher_ends_when_its_parent_is_killed(tmp_path: Path) -> None:
    argv = [sys.executable, "-c", PARENT, str(tmp_path / "t")]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    with subprocess.Popen(argv, stdout=subprocess.PIPE, env=environment) as parent:
        assert parent.stdout is not None
        watcher = psutil.Process(int(parent.stdout.readline()))
        parent.kill()
    assert eventually(lambda: not watcher.is_running() or watcher.status() == psutil.STATUS_ZOMBIE)


def test_the_first_reading_of_the_counters_is_waited_for_before_the_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """LightLLM's `/metrics` took up to 3 s: without a baseline nothing that a load adds can be told."""
    path = tmp_path / "telemetry.jsonl"
    with Watcher() as watcher:  # it has no task: the readings are ours
        watcher._path = path
        monkeypatch.setattr(watch, "BASELINE_S", 0.05)
        assert not watcher.await_baseline()
        path.write_bytes(as_lines([Row(1, "host", "n_cpus", 2.0)]))
        assert not watcher.await_baseline()
        monkeypatch.setattr(watch, "BASELINE_S", 5.0)
        with path.open("ab") as log:
            log.write(as_lines([Row(2, "engine", "scrape_s", 3.0)]))
        assert watcher.await_baseline()
