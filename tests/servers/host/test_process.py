import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import psutil
import pytest

from burstline.servers.engines.vllm import Vllm
from burstline.servers.host import child, process, ready
from burstline.servers.host.ready import RefusalError, getter, wait_ready
from burstline.servers.launch import Launch
from burstline.servers.messages import EngineError, Target
from burstline.servers.redact import learn

FAKE = str(Path(__file__).with_name("fake_server.py"))
ROOT = Path(__file__).parents[3]
LINUX = pytest.mark.skipif(sys.platform != "linux", reason="only Linux has child subreapers")


def fake(how: str, *arguments: object, grace_s: float = 5.0, **more: object) -> Launch:
    argv = (sys.executable, FAKE, how, *map(str, arguments))
    return Launch(argv, stop_grace_s=grace_s, **more)  # type: ignore[arg-type]


def gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def eventually(condition: Callable[[], bool], within_s: float = 20.0) -> bool:
    deadline = time.monotonic() + within_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def listens(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
        return True
    return False


def family_of(folder: Path) -> list[int]:
    assert eventually((folder / "pids").exists)
    return [int(pid) for pid in (folder / "pids").read_text().split()]


def test_a_server_is_ready_once_it_has_generated_a_token_and_stopping_leaves_nothing(tmp_path: Path) -> None:
    port = process.free_port()
    target = Target(f"http://127.0.0.1:{port}", "m")
    with process.start(fake("serves", port), tmp_path / "log") as server:
        assert server.alive()
        assert wait_ready(Vllm(), server, target, timeout_s=30).ready_s > 0
        assert getter(target)("/version").body == b'"ok"'
        with pytest.raises(EngineError, match=f"port {port} .* held by pid {server.pid}"):
            process.require_free_port("127.0.0.1", port)
    assert (server.alive(), server.exit_code) == (False, -signal.SIGTERM)
    assert server.stop() == -signal.SIGTERM
    assert gone(server.pid)
    assert gone(server.keeper_pid)
    process.require_free_port("127.0.0.1", port)


def test_a_server_that_dies_during_its_start_fails_at_once_with_its_root_cause(tmp_path: Path) -> None:
    with process.start(fake("dies"), tmp_path / "log") as server:
        with pytest.raises(EngineError) as caught:
            wait_ready(Vllm(), server, Target(f"http://127.0.0.1:{process.free_port()}", "m"), timeout_s=60)
        assert server.exit_code == 3
    assert "vLLM ended with exit code 3 before it was ready: RuntimeError: no weights at all" in str(
        caught.value
    )
    assert str(tmp_path / "log") in str(caught.value)


def test_a_server_that_dies_while_it_keeps_a_request_is_told_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ready, "PAGE_TIMEOUT_S", 600.0)
    told = pytest.raises(EngineError, match="exit code 3")
    with (
        socket.create_server(("127.0.0.1", 0)) as mute,
        process.start(fake("dies"), tmp_path / "log") as server,
        told,
    ):
        wait_ready(Vllm(), server, Target(f"http://127.0.0.1:{mute.getsockname()[1]}", "m"), timeout_s=600)


@pytest.mark.skipif(sys.platform != "linux", reason="cores are chosen on Linux only")
def test_a_server_may_be_kept_to_some_of_the_cores(tmp_path: Path) -> None:
    ours = os.sched_getaffinity(0)
    with process.start(fake("sleeps", n_cores=1), tmp_path / "log") as server:
        assert eventually(lambda: server.last_line() == "loading ...")
        assert os.sched_getaffinity(server.pid) == {min(ours)}
    with process.start(fake("sleeps"), tmp_path / "log") as server:
        assert os.sched_getaffinity(server.pid) == ours
    assert os.sched_getaffinity(0) == ours


def test_a_server_that_never_gets_ready_is_given_up_with_its_last_line(tmp_path: Path) -> None:
    seen: list[str] = []
    with process.start(fake("sleeps"), tmp_path / "log") as server:
        assert eventually(lambda: server.last_line() == "loading ...")
        with pytest.raises(EngineError, match=r"not ready after 0.6 s: .* its log ends: loading \.\.\."):
            wait_ready(
                Vllm(),
                server,
                Target(f"http://127.0.0.1:{process.free_port()}", "m"),
                timeout_s=0.6,
                progress=lambda _, words: seen.append(words),
            )
    assert "starting; its log ends: loading ..." in seen


def test_a_server_that_refuses_the_request_is_not_waited_for(tmp_path: Path) -> None:
    port = process.free_port()
    target = Target(f"http://127.0.0.1:{port}", "m")
    refusal = pytest.raises(RefusalError, match="The model `m` does not exist")
    with process.start(fake("refuses", port), tmp_path / "log") as server, refusal:
        wait_ready(Vllm(), server, target, timeout_s=60)


def test_an_answer_without_a_token_is_not_ready(tmp_path: Path) -> None:
    port = process.free_port()
    target = Target(f"http://127.0.0.1:{port}", "m")
    given_up = pytest.raises(EngineError, match="returns none")
    with process.start(fake("generates_nothing", port), tmp_path / "log") as server:
        assert eventually(lambda: listens(port))
        with given_up:
            wait_ready(Vllm(), server, target, timeout_s=2)


@pytest.mark.timeout(60)
@pytest.mark.parametrize(("of_engine_s", "now_s"), [(0.3, 0.3), (600.0, 0.3)])
def test_a_server_deaf_to_sigterm_is_killed_after_its_grace(
    of_engine_s: float, now_s: float, tmp_path: Path
) -> None:
    server = process.start(fake("stubborn", grace_s=of_engine_s), tmp_path / "log")
    server.grace_s = now_s
    assert eventually(lambda: server.last_line() == "loading ...")
    assert server.stop() == -signal.SIGKILL
    assert gone(server.pid)


@pytest.mark.slow
def test_a_crash_of_the_first_process_takes_its_whole_family_along(tmp_path: Path) -> None:
    with process.start(fake("family", tmp_path), tmp_path / "log") as server:
        pids = family_of(tmp_path)
        os.kill(server.pid, signal.SIGKILL)
        assert eventually(lambda: all(map(gone, pids)))
        assert server.exit_code == -signal.SIGKILL


@LINUX
def test_stopping_ends_orphans_in_sessions_of_their_own(tmp_path: Path) -> None:
    with process.start(fake("family", tmp_path), tmp_path / "log"):
        pids = family_of(tmp_path)
        assert len(pids) == 3
        assert not any(map(gone, pids))
    assert not any(map(psutil.pid_exists, pids))


@LINUX
@pytest.mark.slow
def test_a_process_whose_main_thread_alone_has_ended_is_not_taken_for_dead(tmp_path: Path) -> None:
    port = process.free_port()
    with process.start(fake("headless", port, tmp_path, grace_s=0.2), tmp_path / "log"):
        pids = family_of(tmp_path)
        assert eventually(lambda: gone(pids[1]))  # it looks so
        with pytest.raises(EngineError, match=f"port {port} "):
            process.require_free_port("127.0.0.1", port)
    process.require_free_port("127.0.0.1", port)
    assert not any(map(psutil.pid_exists, pids))


@pytest.mark.slow
def test_what_an_engine_leaves_beside_its_processes_is_removed_by_the_name_it_logged(tmp_path: Path) -> None:
    mine, other = tmp_path / "shm_00c0ffee_0_kv", tmp_path / "shm_0badcafe_0_kv"
    fixed = tmp_path / "tgi-8001-0"
    log = tmp_path / "log"
    log.write_text("INFO my name is 00c0ffee_0\n")
    launch = fake(
        "family",
        tmp_path,
        leftovers=(f"{tmp_path}/shm_{{id}}_*", f"{tmp_path}/tgi-8001-*"),
        leftover_id=r"my name is ([0-9a-f]{8}_\d)",
    )
    with process.start(launch, log):
        family_of(tmp_path)
        for path in (mine, other, fixed):
            path.touch()
    assert [path.exists() for path in (mine, other, fixed)] == [False, True, False]


PARENT = """
import os, sys, time
from pathlib import Path
from burstline.servers.launch import Launch
from burstline.servers.host import process
folder = Path(sys.argv[2])
server = process.start(Launch((sys.executable, sys.argv[1], "family", str(folder))), folder / "log")
forked = os.fork()  # it holds the keeper's input open, as a worker of multiprocessing would
if forked:
    print(server.pid, server.keeper_pid, forked, flush=True)
time.sleep(600)
"""


@pytest.fixture
def parent(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    argv = [sys.executable, "-c", PARENT, FAKE, str(tmp_path)]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    with subprocess.Popen(argv, stdout=subprocess.PIPE, env=environment) as started:
        yield started
        started.kill()


@LINUX
@pytest.mark.parametrize("number", [signal.SIGKILL, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_a_killed_parent_leaves_nothing_behind(
    tmp_path: Path, parent: subprocess.Popen[bytes], number: signal.Signals
) -> None:
    pids = family_of(tmp_path)
    assert parent.stdout is not None
    *ours, forked = [int(pid) for pid in parent.stdout.readline().split()]
    parent.send_signal(number)
    assert eventually(lambda: all(map(gone, pids + ours)))
    os.kill(forked, signal.SIGKILL)


def test_a_keeper_that_is_told_to_end_ends_the_engine(tmp_path: Path) -> None:
    with process.start(fake("sleeps"), tmp_path / "log") as server:
        assert eventually(lambda: server.last_line() == "loading ...")
        os.kill(server.keeper_pid, signal.SIGTERM)
        assert eventually(lambda: gone(server.pid))


@pytest.mark.usefixtures("fresh")
def test_what_an_engine_prints_of_its_environment_is_known_by_names_and_forms(tmp_path: Path) -> None:
    """Nothing was learned: an engine may have read its secrets from a file of its own."""
    lines = {
        "DB_PASSWORD=seven77": "DB_PASSWORD=(removed)",
        "ADMIN_SECRET=open sesame": "ADMIN_SECRET=(removed) sesame",
        "DATABASE_URL=postgres://me:seven77@host/db": "DATABASE_URL=postgres://(removed)@host/db",
        "GH_PAT=v4lue-1": "GH_PAT=(removed)",
        "A=x;AccountKey=v4lue-2;y": "A=x;AccountKey=(removed);y",
        "Avg generation throughput: 5.0 tokens/s": "Avg generation throughput: 5.0 tokens/s",
    }
    say = f"print(*{list(lines)}, sep='\\n')"
    with process.start(Launch((sys.executable, "-c", say)), tmp_path / "log") as server:
        assert eventually(lambda: server.exit_code == 0)
    assert server.log().splitlines() == list(lines.values())


@pytest.mark.usefixtures("fresh")
def test_what_an_engine_prints_of_our_secrets_is_in_no_log_and_its_last_line_steers_no_terminal(
    tmp_path: Path,
) -> None:
    learn("SECRETKEY12345678")
    say = "print('--api-key SECRETKEY12345678 \\x1b[2J')"
    with process.start(Launch((sys.executable, "-c", say)), tmp_path / "log") as server:
        assert eventually(lambda: server.exit_code == 0)
    assert server.log() == "--api-key (removed) \x1b[2J\n"
    assert "\x1b" not in server.last_line()


def test_a_keeper_that_starts_nothing_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mute = partial(child.Child, "tests.servers.host.obedient")
    monkeypatch.setattr(process, "Child", lambda _, *args, **kwargs: mute(*args, **kwargs))
    monkeypatch.setattr(process, "START_S", 0.01)
    with pytest.raises(EngineError, match=r"cannot start .*: the keeper did not answer within 0\.01 s"):
        process.start(fake("sleeps"), tmp_path / "log")


@LINUX
@pytest.mark.parametrize("how", ["sleeps", "stubborn"])
def test_a_killed_keeper_takes_the_engine_with_it_a_deaf_one_when_it_is_stopped(
    tmp_path: Path, how: str
) -> None:
    server = process.start(fake(how), tmp_path / "log")
    assert eventually(lambda: server.last_line() == "loading ...")
    os.kill(server.keeper_pid, signal.SIGKILL)
    assert how == "stubborn" or eventually(lambda: gone(server.pid))
    assert eventually(lambda: not server.alive())  # the keeper ends after the engine has had its signal
    server.stop()
    assert eventually(lambda: gone(server.pid))


@LINUX
def test_a_keeper_that_stands_still_while_it_ends_the_engine_is_killed_with_all_below_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "SILENT_S", 0.5)
    server = process.start(fake("family", tmp_path, grace_s=600.0), tmp_path / "log")
    pids = family_of(tmp_path)
    os.kill(server.pid, signal.SIGSTOP)  # so that it does not end
    stopping = threading.Thread(target=server.stop, daemon=True)
    stopping.start()
    time.sleep(0.2)
    os.kill(server.keeper_pid, signal.SIGSTOP)
    stopping.join(20)
    assert not stopping.is_alive()
    assert eventually(lambda: all(map(gone, pids)))
    assert gone(server.keeper_pid)


def test_a_keeper_that_stands_still_before_it_has_started_the_engine_does_not_outlive_an_interrupt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = []

    def interrupted(keeper: child.Child, _: float) -> None:
        kept.append(keeper.pid)
        os.kill(keeper.pid, signal.SIGSTOP)
        raise KeyboardInterrupt

    monkeypatch.setattr(child.Child, "receive", interrupted)
    with pytest.raises(KeyboardInterrupt):
        process.start(fake("sleeps"), tmp_path / "log")
    assert eventually(lambda: gone(kept[0]))


@pytest.mark.slow
def test_a_keeper_that_says_that_it_still_ends_the_engine_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "SILENT_S", 2.0)
    server = process.start(fake("stubborn", grace_s=3.0), tmp_path / "log")
    assert eventually(lambda: server.last_line() == "loading ...")
    assert server.stop() == -signal.SIGKILL, "the keeper, not its own parent, has killed it"


def test_what_is_to_run_after_an_engine_runs_when_it_is_asked_to_end(tmp_path: Path) -> None:
    launch = fake("sleeps", after=(sys.executable, "-c", f"open({str(tmp_path / 'after')!r}, 'w')"))
    with process.start(launch, tmp_path / "log"):
        assert not (tmp_path / "after").exists()
    assert (tmp_path / "after").exists()


def test_what_an_engine_that_ended_has_started_may_end_by_itself(tmp_path: Path) -> None:
    orphan = f"import subprocess as s; s.Popen(['sh', '-c', 'sleep 0.3; touch {tmp_path}/tidy'])"
    with process.start(Launch((sys.executable, "-c", orphan)), tmp_path / "log") as server:
        assert eventually(lambda: server.exit_code == 0)
    assert (tmp_path / "tidy").exists()


def test_the_environment_asked_for_reaches_the_engine_and_nothing_of_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(child.BLAS_THREADS, raising=False)
    launch = fake("tells", tmp_path / "told", env={"TOLD": "yes"})
    with process.start(launch, tmp_path / "log") as server:
        assert eventually(lambda: server.exit_code == 0)
    told = json.loads((tmp_path / "told").read_text())
    assert told["TOLD"] == "yes"
    assert child.BLAS_THREADS not in told  # its keeper has it


def test_a_command_that_does_not_exist_is_an_engine_error(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="cannot start /no/such: No such file or directory"):
        process.start(Launch(("/no/such",)), tmp_path / "log")


def test_a_taken_port_names_its_holder_and_a_free_port_is_free() -> None:
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(
            EngineError, match=f"port {port} on 127.0.0.1 cannot be used: Address already in use"
        ):
            process.require_free_port("127.0.0.1", port)
    process.require_free_port("127.0.0.1", process.free_port())


def test_a_host_is_looked_up_in_its_own_family_and_one_that_is_not_ours_is_refused() -> None:
    for host, why in (("", "it is empty"), ("203.0.113.9", "assign"), ("no.invalid", "expected an address")):
        with pytest.raises(EngineError, match=why):
            process.require_host(host)
    process.require_host("localhost")
    if socket.has_ipv6:
        process.require_host("::1")
        process.require_free_port("::1", process.free_port("::1"))
