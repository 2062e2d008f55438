"""Faults of processes and of people: signals at any moment, killed parts, hostile folders, secrets, disks."""

from __future__ import annotations

import base64
import contextlib
import itertools
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from urllib.parse import quote

import psutil
import pytest

from burstline.loadgen.capture.files import PARTIAL
from burstline.measure.record.rundir import open_run
from tests.faults import hostile
from tests.faults.lab import REPOSITORY, Command, Ended, burstline, counted, files_with, noted, verb
from tests.seeds import SEED
from tests.verdicts import done

SMALL = ("--requests", "40", "--prompt-tokens", "8", "--output-tokens", "4")
N_SIGNALS = int(os.environ.get("LAB_SIGNALS", "6"))
"""Moments for each signal; set LAB_SIGNALS=24 for a thorough search, TEST_SEED for the same moments."""
HANG_S, WHOLE_S = 20.0, 10.0
"""How long an end may take, the report included, where a whole run takes at most so long: twice that, because other
tests run beside it."""
PHASES = {"prepare": 0.02, "decode": 0.5, "report": 0.3, "start": 0.3, "load": 1.5}
"""Each must be met by a thorough search: so long after its begin, at most, an aimed signal is sent."""
N_THOROUGH = 20
FROM_LOAD_ON = ("load", "decode", "summarise", "report", "end")
"""An interrupt in one of these still gets its report."""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


def outcomes(run: Path) -> Counter[str]:
    return Counter(open_run(run).request_table.column("outcome").to_pylist())


def verdict(run: Path) -> str:
    return str(json.loads((run / "summary.json").read_text())["verdict"]["state"])


# Signals.


def whole_run(out: Path, cache: Path) -> Command:
    """A whole run: start, prepare, load, decode, report."""
    load = ("--requests", "300", "--rate", "200", "--prompt-tokens", "8", "--output-tokens", "8", "-q")
    argv = ("run", "--out", str(out), "--engine", "truth", *load)
    return Command(out, *argv, XDG_CACHE_HOME=str(cache))


def runs_in(out: Path) -> list[Path]:
    """Folders of runs, without one that was killed before it had its manifest."""
    return (
        [path for path in out.iterdir() if path.is_dir() and path.suffix != PARTIAL] if out.exists() else []
    )


def phase_of(out: Path) -> str:
    """How far a run has come, by the files that it has."""
    runs = runs_in(out)
    if not runs:
        return "begin"
    names = {path.name for path in runs[0].iterdir()}
    for name, phase in (
        ("report.html", "end"),
        ("summary.json", "report"),
        ("records.parquet", "summarise"),
        ("telemetry.parquet", "decode"),
        ("captures", "load"),
        ("telemetry.jsonl", "prepare"),
        ("server.log", "start"),
    ):
        if name in names:
            return phase
    return "begin"


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP", "SIGKILL"])
def test_a_signal_at_any_moment_ends_all_and_leaves_a_readable_folder(name: str, tmp_path: Path) -> None:
    number = getattr(signal, name)
    whole_s = whole_run(tmp_path / "whole", tmp_path / "cache").end().time_s
    limit_s = HANG_S * max(1.0, whole_s / WHOLE_S)
    rng = random.Random(f"{name} {SEED}")
    phases: Counter[str] = Counter()
    bad: list[str] = []
    longest_s = 0.0
    # Every second moment is any, the others lie in each phase in turn: the short ones would be missed.
    turns = itertools.cycle(PHASES)
    aims = [next(turns) if k % 2 else None for k in range(N_SIGNALS)]
    for k, aim in enumerate(aims):
        out = tmp_path / str(k)
        command = whole_run(out, tmp_path / "cache")
        if aim is None:
            time.sleep(whole_s * (k + rng.random()) / N_SIGNALS)
        else:
            while command.alive() and phase_of(out) not in (aim, "end"):
                time.sleep(0.002)
            time.sleep(PHASES[aim] * rng.random())
        phase = phase_of(out)
        was_alive = command.alive()
        sent_s = time.monotonic()
        command.send(number)
        ended = command.end(timeout_s=60)
        took_s = time.monotonic() - sent_s
        phases[phase if was_alive else "over"] += 1
        longest_s = max(longest_s, took_s)
        bad += [f"{k} in {phase}: {what}" for what in problems(ended, was_alive, phase, number)]
        bad += [f"{k} in {phase}: took {took_s:.1f} s"] if took_s > limit_s else []
        shutil.rmtree(out, ignore_errors=True)
        if aim is not None and phases[aim] == 0 and len(aims) < 2 * N_SIGNALS:
            aims.append(aim)
    n = len(aims)
    seen = f"{n - len(bad)} of {n} right; longest {longest_s:.1f} s; {dict(phases)}"
    noted(f"{name} at {n} random moments", "no hang, no orphan, readable, exit code", seen, longest_s)
    assert not bad, "\n".join(bad)
    if N_SIGNALS >= N_THOROUGH:
        assert set(PHASES) <= set(phases), seen


def by_the_interpreter(out: str) -> set[int]:
    """The exit codes of CPython itself by SIGINT where it has not come to our command; it may print its own trace."""
    return set() if "burstline/cli.py" in out else {-2, 1} if "KeyboardInterrupt" in out else {-2}


def problems(ended: Ended, was_alive: bool, phase: str, number: int) -> list[str]:
    found = []
    if ended.orphans:
        found.append(f"orphans: {[p.pid for p in ended.orphans]}")
    # 4: it was over before the signal came, and other tests may have disturbed it.
    interrupted = {130, 0, 4, *by_the_interpreter(ended.out), -int(number)}
    # Once the page is written, a kill may meet a process that has already exited and waits for its parent.
    killed = {-9, 0, 4} if phase == "end" else {-9}
    allowed = {0, 4} if not was_alive else killed if number == signal.SIGKILL else interrupted
    if ended.code not in allowed:
        found.append(f"exit code {ended.code}: {ended.out[-600:]}")
    if "Traceback" in ended.out and not by_the_interpreter(ended.out):
        found.append(f"a traceback: {ended.out[-1500:]}")
    for run in runs_in(ended.out_dir):
        code, said = verb("report", "--format", "text", run)
        if code != 0 or "Traceback" in said:
            found.append(f"show exits {code}: {said[-600:]}")
        if was_alive and number != signal.SIGKILL and phase in FROM_LOAD_ON:
            if not (run / "report.html").exists():
                found.append(f"no report: {ended.out[-600:]}")
            if json.loads((run / "manifest.json").read_bytes())["status"] == "running":
                found.append("the manifest says that it still runs")
    return found


def test_an_interrupt_while_it_starts_ends_it_quietly(tmp_path: Path) -> None:
    """Where Python raises it inside an extension's half-done import, some of these end in a crash."""
    began_s = time.monotonic()
    argv = [sys.executable, "-P", "-m", "burstline", "engines"]
    env = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    subprocess.run(argv, env=env, stdout=subprocess.DEVNULL, check=True)
    whole_s = time.monotonic() - began_s
    rng = random.Random(SEED)
    codes: Counter[str] = Counter()
    for _ in range(60):
        command = subprocess.Popen(argv, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        time.sleep(whole_s * rng.random())
        command.send_signal(signal.SIGINT)
        out, _ = command.communicate(timeout=60)
        assert command.returncode in {0, 130, *by_the_interpreter(out)}, out
        codes[str(command.returncode)] += 1
    noted("Ctrl-C while it starts", "-2 or 130, no crash", counted(codes), time.monotonic() - began_s)
    assert codes["-2"] or codes["130"], codes


@pytest.mark.measures
def test_two_interrupts_in_a_row_end_it(tmp_path: Path) -> None:
    command = whole_run(tmp_path / "out", tmp_path / "cache")
    while command.alive() and phase_of(command.out_dir) not in ("load", "end"):
        time.sleep(0.01)
    command.send(signal.SIGINT)
    time.sleep(0.05)
    command.send(signal.SIGINT)
    began_s = time.monotonic()
    ended = command.end(timeout_s=60)
    took_s = time.monotonic() - began_s
    noted("Ctrl-C twice", "130, no orphan", f"{ended.code}, {len(ended.orphans)} orphans", took_s)
    assert ended.code in (130, 0, 4)  # 0 and 4: the second came when its report was written
    assert not ended.orphans
    assert took_s < HANG_S
    assert "Traceback" not in ended.out


# Parts that are killed.


def killed_part(tmp_path: Path, module: str) -> tuple[Ended, Path]:
    load = ("--requests", "400", "--rate", "100", "--prompt-tokens", "8", "--output-tokens", "4", "-q")
    out = tmp_path / "out"
    argv = ("run", "--out", str(out), "--engine", "truth", *load)
    command = Command(out, *argv)
    deadline_s = time.monotonic() + 40
    while phase_of(out) != "load" and time.monotonic() < deadline_s:
        time.sleep(0.05)
    time.sleep(1.0)
    for process in command.family():
        with contextlib.suppress(psutil.NoSuchProcess):  # one may end meanwhile
            if module in process.cmdline():
                process.kill()
    ended = command.end(timeout_s=60)
    return ended, ended.run


def test_a_killed_driver_is_told_in_one_line_with_a_report(tmp_path: Path) -> None:
    ended, run = killed_part(tmp_path, "burstline.loadgen.driver.drive")
    noted(
        "kill -9 of a load driver",
        "report, no traceback",
        f"exit {ended.code}, {counted(outcomes(run))}",
        ended.time_s,
    )
    assert "Traceback" not in ended.out
    assert "was killed by signal 9" in ended.out + (run / "summary.json").read_text() + str(
        open_run(run).request_table.column("error").to_pylist()
    )
    assert (run / "report.html").exists()
    assert sum(outcomes(run).values()) == 400
    assert not ended.orphans


def test_a_killed_server_is_its_own_fault_with_a_report(tmp_path: Path) -> None:
    ended, run = killed_part(tmp_path, "burstline.servers.truth")
    noted(
        "kill -9 of the server",
        "exit 5, report",
        f"exit {ended.code}, {counted(outcomes(run))}",
        ended.time_s,
    )
    assert ended.code == 5, ended.out
    assert (run / "report.html").exists()
    assert sum(outcomes(run).values()) == 400
    assert not ended.orphans


@pytest.mark.parametrize("module", ["burstline.servers.host.watch", "burstline.servers.host.keeper"])
def test_a_killed_helper_costs_no_report(module: str, tmp_path: Path) -> None:
    ended, run = killed_part(tmp_path, module)
    noted(
        f"kill -9 of {module}",
        "report, no orphan",
        f"exit {ended.code}, {len(ended.orphans)} orphans",
        ended.time_s,
    )
    assert (run / "report.html").exists()
    assert "Traceback" not in ended.out
    assert not ended.orphans


# The working directory, the disk, what a person types.


def test_modules_in_the_working_directory_are_never_imported(tmp_path: Path) -> None:
    cwd = tmp_path / "cwd"
    for name in ("psutil", "json", "orjson", "numpy", "zstandard", "multiprocessing", "select"):
        (cwd / name).mkdir(parents=True)
        (cwd / name / "__init__.py").write_text(
            f"open({str(tmp_path / 'executed')!r}, 'a').write({name!r})\n1 / 0\n"
        )
    for name in ("servers", "loadgen"):
        (cwd / name).mkdir()
        (cwd / name / "__init__.py").write_text(
            f"open({str(tmp_path / 'executed')!r}, 'a').write({name!r})\n1 / 0\n"
        )
    ended = burstline(tmp_path / "out", "--engine", "truth", *SMALL, cwd=cwd)
    executed = tmp_path / "executed"
    seen = executed.read_text() if executed.exists() else "nothing executed"
    noted("psutil.py, servers/ ... in the working directory", "nothing executed", seen, ended.time_s)
    assert not executed.exists()
    assert done(ended.code, ended.out_dir), ended.out
    assert open_run(ended.run).telemetry is not None


def test_a_working_directory_that_is_gone(tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    code = f"import os, sys; os.chdir({str(gone)!r}); os.rmdir({str(gone)!r}); os.execv(sys.executable, sys.argv[1:])"
    argv = [sys.executable, "-P", "-m", "burstline", "run", "--engine", "truth", *SMALL]
    env = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    ended = subprocess.run(
        [sys.executable, "-c", code, *argv], capture_output=True, text=True, env=env, check=False
    )
    noted(
        "the working directory was deleted",
        "exit 2, one line",
        f"exit {ended.returncode}: {ended.stderr.strip()[-80:]}",
        0,
    )
    assert ended.returncode == 2
    assert "Traceback" not in ended.stderr


@pytest.mark.parametrize(
    "argv",
    [
        ("--requests", "99999999999"),
        ("--requests", "0"),
        ("--deadline-s", "inf"),
        ("--deadline-s", "nan"),
        ("--rate", "nan", "--requests", "5"),
        ("--rate", "inf", "--requests", "5"),
        ("--duration-s", "inf", "--rate", "5"),
        ("--url", "http://h:abc"),
        ("--url", "http://h:99999"),
        ("--url", "http://user:p/w@h"),
        ("--url", "http://h/?api_key=planted"),
        ("--url", "ftp://h"),
        ("--port", "99999"),
        ("--max-failures", "2"),
        ("--max-failures", "nan"),
        ("--workers", "100000"),
        ("--concurrency", "99999999999"),
        ("--prompt-tokens", "99999999999"),
    ],
    ids=" ".join,
)
def test_what_nobody_can_mean_is_one_line_and_exit_code_2(argv: tuple[str, ...], tmp_path: Path) -> None:
    ended = burstline(tmp_path / "out", *argv, timeout_s=30)
    last = ended.out.strip().splitlines()[-1] if ended.out.strip() else ""
    noted(" ".join(argv), "exit 2, one line", f"exit {ended.code}: {last}", ended.time_s)
    assert ended.code == 2, ended.out
    assert "Traceback" not in ended.out
    assert "planted" not in ended.out


@pytest.mark.parametrize(
    ("room_kb", "kept"), [(12, False), (60, False), (400, False), (3000, True), (4500, True)]
)
def test_a_full_disk_is_one_line_and_what_was_captured_is_kept(
    room_kb: int, kept: bool, tmp_path: Path
) -> None:
    mount = tmp_path / "mount"
    mount.mkdir()
    inside = (
        f"mount -t tmpfs -o size={room_kb}k tmpfs {mount} && {sys.executable} -P -m burstline run --engine truth "
        f"--requests 3000 --prompt-tokens 400 --output-tokens 40 --out {mount}/runs -q; code=$?; "
        f"cp -r {mount}/runs {tmp_path}/copy; exit $code"
    )
    env = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    began_s = time.monotonic()
    ended = subprocess.run(
        ["unshare", "-m", "sh", "-c", inside],
        capture_output=True,
        text=True,
        env=env,
        timeout=120,
        check=False,
    )
    if "unshare failed" in ended.stderr or "permission denied" in ended.stderr:
        pytest.skip("no mount namespaces here")
    *others, last = ended.stderr.strip().splitlines()
    noted(
        f"the disk is full at {room_kb} kB",
        "exit 2, one line",
        f"exit {ended.returncode}: {last[:60]}",
        time.monotonic() - began_s,
    )
    assert ended.returncode == 2, ended.stderr
    assert others == []
    assert last.startswith("burstline: ")
    assert "disk is full" in last or "bytes are free" in last
    if kept:
        (run,) = (tmp_path / "copy").iterdir()
        verb("report", run)
        assert 0 < outcomes(run)["ok"] < 3000


# Secrets.

PLANTED = {
    "argument": "arg-s3cr3t-0001",
    "json": "json-s3cr3t-0002",
    "header": "hdr-s3cr3t-0003",
    "environment": "env-s3cr3t-0004",
    "password": "p@ss-s3cr3t-0005",
    "key": "key/s3cr3t+0006=",
    "query": "query-s3cr3t-0007",
}


def needles() -> list[bytes]:
    basic = base64.b64encode(f"user:{PLANTED['password']}".encode()).decode()  # as the header has it
    found = set()
    for secret in (*PLANTED.values(), basic):
        found |= {
            secret,
            quote(secret),
            quote(secret, safe=""),
            json.dumps(secret)[1:-1],
            secret.replace("/", "\\/"),
        }
    return [each.encode() for each in sorted(found)]


def exported(run: Path, folder: Path) -> str:
    said = ""
    formats = ("--format", "csv", "--format", "markdown")
    for argv in (
        ("report", "--format", "text", run),
        ("report", "--format", "json", run),
        ("report", run, "--to", folder, *formats),
        ("report", run),
    ):
        said += verb(*argv)[1]
    return said


def test_planted_secrets_are_in_no_file_of_a_run_that_started_the_engine(tmp_path: Path) -> None:
    command_args = (
        "run", "--out", str(tmp_path / "out"), "--engine", "truth", *SMALL,
        "--", "--model", f"https://user:{quote(PLANTED['password'], safe='')}@hub/m?token={PLANTED['query']}",
    )  # fmt: skip
    began_s = time.monotonic()
    command = Command(tmp_path / "out", *command_args, SOME_API_KEY=PLANTED["environment"])
    titles: set[str] = set()
    while command.alive():
        for process in command.family():
            with contextlib.suppress(psutil.Error):
                words = process.cmdline()
                # What the user typed is the user's: the command itself, a fork of it, and the engine.
                if "burstline" not in words and "burstline.servers.truth" not in words:
                    titles.add(" ".join(words))
        time.sleep(0.1)
    ended = command.end()
    texts = ended.out + exported(ended.run, tmp_path / "export")
    leaks = files_with(tmp_path / "out", needles()) + files_with(tmp_path / "export", needles())
    leaks += [f"terminal: {n!r}" for n in needles() if n.decode() in texts]
    leaks += [f"title: {n!r}" for n in needles() if any(n.decode() in title for title in titles)]
    noted(
        "secrets in engine arguments and environment",
        "none written",
        leaks or "none",
        time.monotonic() - began_s,
    )
    assert not leaks
    assert done(ended.code, ended.out_dir), ended.out


def test_planted_secrets_are_in_no_file_of_a_run_that_failed(tmp_path: Path) -> None:
    """vLLM is not there: the command fails, with its arguments in the manifest."""
    began_s = time.monotonic()
    arguments = (
        "--api-key", PLANTED["argument"], "--override", json.dumps({"api_key": PLANTED["json"]}),
        "-H", f"X-API-Key: {PLANTED['header']}",
    )  # fmt: skip
    ended = burstline(tmp_path / "out", "--engine", "truth", *SMALL, "--", *arguments)
    texts = ended.out
    for run in runs_in(ended.out_dir):
        texts += exported(run, tmp_path / "export")
    leaks = files_with(tmp_path / "out", needles())
    leaks += [f"terminal: {n!r}" for n in needles() if n.decode() in texts]
    noted(
        "secrets as --api-key, header and JSON arguments",
        "none written",
        leaks or "none",
        time.monotonic() - began_s,
    )
    assert not leaks


def test_planted_secrets_are_in_no_file_of_an_attached_run_whose_server_quotes_them(tmp_path: Path) -> None:
    began_s = time.monotonic()
    with hostile.serving(hostile.for_some(hostile.quotes_authorization, 2), n_honest=1) as server:
        url = server.url.replace("://", f"://user:{quote(PLANTED['password'], safe='')}@")
        ended = burstline(
            tmp_path / "out", "--engine", "vllm", "--vocab-size", "1000", "--url", url, "--model", "m", *SMALL,
            BURSTLINE_API_KEY=PLANTED["key"],
        )  # fmt: skip
        refused = burstline(
            tmp_path / "refused",
            "--engine",
            "vllm",
            "--vocab-size",
            "1000",
            "--url",
            url.replace("user", "x@y"),
            *SMALL,
        )
        bad = server.url.replace("://", "://user:" + PLANTED["password"].replace("@", "/") + "@")
        slip = burstline(tmp_path / "slip", "--engine", "vllm", "--vocab-size", "1000", "--url", bad, *SMALL)
    texts = ended.out + refused.out + slip.out + exported(ended.run, tmp_path / "export")
    leaks = files_with(tmp_path, needles())
    leaks += [f"terminal: {n!r}" for n in needles() if n.decode() in texts]
    leaks += [f"terminal: {n}" for n in (PLANTED["password"].replace("@", "/"),) if n in texts]
    noted(
        "secrets in the URL, key quoted by the server",
        "none written",
        leaks or "none",
        time.monotonic() - began_s,
    )
    assert not leaks
    assert outcomes(ended.run)["http_401"] > 5


@pytest.mark.parametrize("name", ["a login alone", "--header X-API-Key", "attaching fails"])
def test_credentials_that_the_server_quotes_are_in_no_file(name: str, tmp_path: Path) -> None:
    greet = hostile.refuses_all if name == "attaching fails" else None
    header = ("--header", f"X-API-Key: {PLANTED['header']}")
    login = f"://user:{quote(PLANTED['password'], safe='')}@"
    with hostile.serving(
        hostile.for_some(hostile.quotes_authorization, 2), greet=greet, n_honest=1
    ) as server:
        url = server.url if name.startswith("--") else server.url.replace("://", login)
        ended = burstline(
            tmp_path / "out", "--engine", "vllm", "--vocab-size", "1000", "--url", url, "--model", "m", *SMALL,
            *(() if name == "a login alone" else header),
        )  # fmt: skip
    runs = runs_in(tmp_path / "out")
    texts = ended.out + "".join(exported(run, tmp_path / "export") for run in runs)
    leaks = files_with(tmp_path, needles()) + [f"terminal: {n!r}" for n in needles() if n.decode() in texts]
    noted(f"secrets quoted by the server: {name}", "none written", leaks or "none", ended.time_s)
    assert not leaks
    if greet is None:
        assert outcomes(ended.run)["http_401"] > 5
    else:
        assert ended.code == 5, ended.out
        assert "401" in ended.out
        assert "Traceback" not in ended.out


# Servers at which a run attaches.


def attach(url: str, tmp_path: Path) -> Ended:
    return burstline(
        tmp_path / "out",
        "--engine",
        "vllm",
        "--vocab-size",
        "1000",
        "--url",
        url,
        "--model",
        "m",
        *SMALL,
        timeout_s=60,
    )


@pytest.mark.parametrize("name", ["a byte a second", "a head that never ends", "a gzip bomb", "hangs"])
def test_attaching_to_a_server_that_dawdles_ends_in_time_and_small(name: str, tmp_path: Path) -> None:
    import gzip

    bomb = gzip.compress(bytes(512 << 20), 6) if name == "a gzip bomb" else b""

    def greet(sock: socket.socket, n: int) -> bool:
        sock.recv(65536)
        if name == "a byte a second":
            hostile.dribbles(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n" + b"x" * 1000, 1.0)(
                sock, None
            )  # type: ignore[arg-type]
        elif name == "a head that never ends":
            hostile.endless(b"x: y\r\n", b"HTTP/1.1 200 OK\r\n")(sock, None)  # type: ignore[arg-type]
        elif name == "a gzip bomb":
            hostile.plain(sock, bomb, more=b"Content-Encoding: gzip\r\n")
        else:
            time.sleep(120)
        return False

    with hostile.serving(hostile.honest, greet=greet) as server:
        ended = attach(server.url, tmp_path)
    peak = ended.peak_rss_bytes / 1e6
    noted(
        f"attaching: {name}",
        "exit 5 within 30 s, below 500 MB",
        f"exit {ended.code}, {peak:.0f} MB",
        ended.time_s,
    )
    assert ended.code == 5, ended.out
    assert ended.time_s < 40
    assert peak < 500
    assert "Traceback" not in ended.out


@pytest.mark.parametrize("name", ["endless streams", "bombs of a line", "endless heads"])
def test_hostile_loads_stay_small_in_memory(name: str, tmp_path: Path) -> None:
    fault = {
        "endless streams": hostile.endless(hostile.chunk(hostile.event())),
        "bombs of a line": hostile.endless(hostile.chunk(b"x" * 5000)),
        "endless heads": hostile.endless(b"x: y\r\n", b"HTTP/1.1 200 OK\r\n"),
    }[name]
    with hostile.serving(fault, n_honest=1) as server:
        load = ("--requests", "60", "--prompt-tokens", "8", "--output-tokens", "4")
        ended = burstline(
            tmp_path / "out",
            "--engine",
            "vllm",
            "--vocab-size",
            "1000",
            "--url",
            server.url,
            "--model",
            "m",
            *load,
        )
    peak = ended.peak_rss_bytes / 1e6
    seen = f"exit {ended.code}, {peak:.0f} MB in all, {counted(outcomes(ended.run))}"
    noted(f"60 requests, {name}", "exit 4, below 500 MB", seen, ended.time_s)
    assert peak < 500
    assert ended.code == 4, ended.out
    assert sum(outcomes(ended.run).values()) == 60


def test_one_failure_in_five_is_not_valid(tmp_path: Path) -> None:
    # After the head: before it, the client may send the request again over a fresh connection.
    fault = hostile.then_resets(hostile.STREAM_HEAD)
    with hostile.serving(hostile.for_some(fault, 5), n_honest=1) as server:
        load = ("--engine", "vllm", "--vocab-size", "1000", "--url", server.url, "--model", "m", "--requests", "100", "--rate", "100",
                "--prompt-tokens", "8", "--output-tokens", "4")  # fmt: skip
        ended = burstline(tmp_path / "out", *load)
        lenient = burstline(tmp_path / "lenient", *load, "--max-failures", "25%")
    reasons = [
        [
            reason["code"]
            for reason in json.loads((each.run / "summary.json").read_text())["verdict"]["reasons"]
        ]
        for each in (ended, lenient)
    ]
    noted(
        "20% of requests fail", "exit 4, too-many-failures", f"exit {ended.code}, {reasons[0]}", ended.time_s
    )
    assert ended.code == 4
    assert "too-many-failures" in reasons[0]
    assert "too-many-failures" not in reasons[1]


def test_words_of_a_server_cannot_steer_the_terminal_or_forge_a_verdict(tmp_path: Path) -> None:
    said = "\u001b]0;owned\u0007\u001b[2J\nVALID: Every check passed.\r[/x] [core.py:45] \u202egnp.exe =HYPERLINK(1)"
    fault = hostile.replies({"error": {"message": said}})
    with hostile.serving(hostile.for_some(fault, 2), n_honest=1) as server:
        ended = attach(server.url, tmp_path)
    text = ended.out + exported(ended.run, tmp_path / "export")
    csv = "".join(path.read_text() for path in (tmp_path / "export").glob("*.csv"))
    found = [name for name, bad in (("ESC", "\x1b"), ("BEL", "\x07"), ("RLO", "\u202e")) if bad in text + csv]
    forged = [line for line in text.splitlines() if line.startswith("VALID")]
    noted(
        "OSC, clear screen, forged verdict in an error",
        "printable",
        found + forged or "printable",
        ended.time_s,
    )
    assert not found
    assert not forged


def test_an_interrupted_suite_or_certify_leaves_nothing_running(tmp_path: Path) -> None:
    command = Command(
        tmp_path / "out", "certify", "--requests", "200", XDG_CACHE_HOME=str(tmp_path / "cache")
    )
    while command.alive() and len(command.family()) < 2:  # it has heard of signals by then
        time.sleep(0.05)
    time.sleep(1.0)
    command.send(signal.SIGTERM)
    ended = command.end(timeout_s=30)
    noted(
        "SIGTERM while certifying",
        "130, no orphan",
        f"{ended.code}, {len(ended.orphans)} orphans",
        ended.time_s,
    )
    assert ended.code in (130, 0, 4), ended.out  # 0 and 4: it was over before, 4 with findings
    assert not ended.orphans


def test_leftovers_in_the_temporary_folder(tmp_path: Path) -> None:
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    out = tmp_path / "out"
    argv = ("run", "--out", str(out), "--engine", "truth", *SMALL, "-q")
    for signal_name in ("SIGKILL", "SIGTERM"):
        command = Command(out, *argv, TMPDIR=str(temporary))
        deadline_s = time.monotonic() + 40
        while (
            phase_of(out) not in ("decode", "summarise", "report")
            and command.alive()
            and time.monotonic() < deadline_s
        ):
            time.sleep(0.005)
        command.send(getattr(signal, signal_name))
        ended = command.end(timeout_s=30)
        left = sorted(path.name for path in temporary.iterdir())
        noted(
            f"{signal_name} while decoding",
            "no orphan, no temporary folder",
            f"{len(ended.orphans)} orphans, {left}",
            ended.time_s,
        )
        assert not ended.orphans
        assert not left
        shutil.rmtree(out)
