"""The laboratory of `burstline certify`: a load generator, ours or another, at a server of known truth."""

import json
import os
import re
import shlex
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Final

import psutil

from burstline.console.stdout import json_text
from burstline.loadgen.wire.os_limits import ensure_sockets
from burstline.measure.record.rundir import open_run
from burstline.measure.record.typed_json import from_json, to_json
from burstline.measure.record.verdict import Use, withheld
from burstline.measure.stats.figure import Estimate
from burstline.measure.verdict.certificate import Certificate, Measured, Printed, certificate
from burstline.models.model_folder import make_model
from burstline.reports.model.foreign import foreign_results, printed_of, read_number
from burstline.servers.host.kernel import allowed_cores, keep_to
from burstline.servers.host.serving import ServingProcesses
from burstline.servers.host.sources import ProcessTree
from burstline.servers.redact import REMOVED, redacted, without_secrets
from burstline.servers.truth.replies import Script
from burstline.servers.truth.rig import TruthRig, truth_server
from burstline.servers.truth.router import SCRIPTS, TruthSetup
from burstline.servers.truth.serve import from_jsonl, to_jsonl
from burstline.workloads.load import Load
from burstline.workloads.model_files import read_json, read_tokenizer
from burstline.workloads.options import given, words_of
from burstline.workloads.request import WorkloadError
from burstline.workloads.rows import lines

EVENTS_PER_S: Final = 20_000
"""As many tokens a second as a fast GPU streams; our truth server sends so many on time."""
GAP_S: Final = 0.01
TTFT_S: Final = 0.2
START_S, OUR_START_S, IDLE_S = 900.0, 120.0, 60.0
"""So much longer than its load a client may take: on a busy machine some import for minutes. One
that neither sends nor computes for `IDLE_S` waits for something that never comes."""
LOOK_S: Final = 10.0
"""How often the server is asked whether it still answers."""
_STARTER: Final = re.compile(r"env|nice|time|sh|bash|uv|uvx|run|python[\d.]*")
_OWN: Final = ("model", "measured.json", "certificate.json", "truth.jsonl")
_PERIOD_S: Final = 0.5
"""Between two samples of memory: the kernel holds up a process while it adds its pages."""
_PLACE: Final = re.compile(r"\{([a-z_]+)\}")
_SAID: Final = {
    *("requests", "prompt_tokens", "output_tokens", "rate", "arrival", "duration_s", "concurrency"),
    *("tokenizer", "salt"),
}
"""What of a load another client can be told."""


def setup_of(script: str, load: Load) -> TruthSetup:
    """What the server plays: its tokens share `EVENTS_PER_S` among all requests in flight, none sooner after
    another than `GAP_S`."""
    gap_s = max(GAP_S, load.n_connections / EVENTS_PER_S)
    return SCRIPTS[script](Script(ttft_s=TTFT_S, gaps_s=(gap_s,)), load.n_connections)


def certified(
    load: Load, script: str, client: str | None, out: Path, reads: Mapping[str, str], name: str | None
) -> Certificate:
    """Run the client, a command line, at the server, None: Burstline itself; its files go to `out`.

    `reads` are places in its JSON files by the name of a number (`ttft.p50`); `name` is what the certificate
    calls it. WorkloadError where its command cannot be run, or fails without a request.
    """
    load = replace(load, spec=replace(load.spec, cancel_share=None), hang_up_tok=None)
    plan = load.plan()
    lengths, concurrency = load.shape.prompt_tok, load.spec.concurrency
    due_s = None if concurrency else tuple(due_ns / 1e9 for due_ns in plan.due_ns)
    asked = load.title, script, len(plan.requests), (lengths.low, lengths.high), due_s, concurrency
    setup = setup_of(script, load)
    longest_s = 2.0 + max(setup.scripts[0].gaps_s) * plan.longest_output_tok
    n_waves = len(plan.requests) / load.n_connections * (4 if setup.slots else 1)
    limit_s = (START_S if client else OUR_START_S) + 2 * n_waves * longest_s + max(due_s or (0.0,))
    ensure_sockets(load.n_at_once)
    cores = allowed_cores()
    with truth_server(setup) as truth:
        if truth.pid:
            keep_to(truth.pid, cores[:1])
        tokenizer = Path(load.spec.tokenizer) if load.spec.tokenizer else None
        if tokenizer is None and client and "{tokenizer}" in client:
            tokenizer = make_model(out / "model", "tiny")
        argv = _argv(client, load, truth, tokenizer, out)
        truth.reset()
        ran = _Ran(argv, out / "tool.log", cores[1:], limit_s, truth)
        rows, refused = truth.log(), json.loads(truth.get("/refused"))
    if client is None and ran.ended == "ended with exit code 4":  # a run that is not VALID
        ran.ended = ""
    if ran.ended and (client is None or not (rows or refused)):
        log = "\n".join((out / "tool.log").read_text("utf-8", "replace").splitlines()[-5:])
        raise WorkloadError(f"the client {ran.ended}: {shlex.join(without_secrets(argv))}\n{log}")
    path = str(tokenizer.resolve() / "tokenizer.json") if tokenizer else None
    spent = ran.cpu_s, ran.pss_bytes, ran.start_s, ran.end_s
    measured = Measured((client and name) or tool_of(argv), *asked, ran.ended, refused, path, *spent)
    (out / "measured.json").write_text(json_text(to_json(measured)), "utf-8")
    (out / "truth.jsonl").write_bytes(to_jsonl(rows))
    return again(out, reads)


def again(out: Path, reads: Mapping[str, str], name: str | None = None) -> Certificate:
    """The certificate of a client that has run, from the files in `out`."""
    try:
        measured = from_json(Measured, read_json(out / "measured.json"))
        if (out / "truth.jsonl").stat().st_size > 1 << 30:
            raise ValueError("truth.jsonl has over 1024 MB")
        rows = from_jsonl(line for _, line in lines(out / "truth.jsonl", "--again"))
    except (OSError, ValueError, TypeError) as error:
        raise WorkloadError(f"--again {out}: expected the folder of `certify --client`: {error}") from None
    count = read_tokenizer(Path(measured.tokenizer)) if measured.tokenizer else None
    counted = (lambda text: len(count.encode(text, add_special_tokens=False))) if count else None
    ours = [path.parent for path in out.glob("*/summary.json")] if measured.tool == "burstline" else []
    printed = _ours(*ours) if len(ours) == 1 else _printed_by(name or measured.tool, reads, out)
    return certificate(rows, measured, printed, counted)


def tool_of(argv: Sequence[str]) -> str:
    """The program or the script that a command line runs, without what only starts it."""
    before = {"-c", "-u"} if Path(argv[0]).name == "env" else {"-c"}  # code, and a variable that `env` drops
    pairs = pairwise(("", *without_secrets(argv)))
    words = (word for last, word in pairs if last not in before and not word.startswith(("-", REMOVED)))
    names = (Path(word).name for word in words if "=" not in word)
    return next((name for name in names if not _STARTER.fullmatch(name)), Path(argv[0]).name)


class _Ran:
    """A command, run to its end and watched; `log` is what it printed."""

    def __init__(self, argv: list[str], log: Path, cores: list[int], limit_s: float, truth: TruthRig) -> None:
        loopback = "127.0.0.1,localhost"
        env = os.environ | {"NO_PROXY": loopback, "no_proxy": loopback}
        self.pss_bytes: float | None = None
        self.start_s, self._watched_cpu_s = time.monotonic(), 0.0
        with log.open("wb") as file:
            try:
                process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=file, stderr=file, env=env)
            except OSError as error:
                raise WorkloadError(f"--client: {argv[0]} cannot be started: {error}") from None
        keep_to(process.pid, cores)
        over = threading.Event()
        watcher = threading.Thread(target=self._watch, args=(process.pid, over), daemon=True)
        watcher.start()
        before_s = sum(os.times()[2:4])  # CPU time of all that this process has started and waited for
        try:
            self.ended = self._wait(process, limit_s, truth)
        finally:
            if process.poll() is None:
                with suppress(psutil.NoSuchProcess):
                    for each in psutil.Process(process.pid).children(recursive=True):
                        each.kill()
                process.kill()
                process.wait()
            self.end_s = time.monotonic()
            over.set()
            watcher.join()
            clean = log.with_suffix(".partial")  # a tool prints its arguments, and the server's errors
            with log.open(errors="surrogateescape") as lines, clean.open("w", errors="surrogateescape") as to:
                to.writelines(map(redacted, lines))
            clean.replace(log)
        self.cpu_s = max(sum(os.times()[2:4]) - before_s, self._watched_cpu_s)

    def _wait(self, process: subprocess.Popen[bytes], limit_s: float, truth: TruthRig) -> str:
        """How the process ended, "" if well; one that waits without a request is not waited for.

        ChildLostError where the server answers no longer, so that the client would wait in vain.
        """
        used_s, idle_from_s = 0.0, self.start_s
        while (left_s := self.start_s + limit_s - time.monotonic()) > 0:
            with suppress(subprocess.TimeoutExpired):
                code = process.wait(min(left_s, LOOK_S, IDLE_S))
                return f"ended with exit code {code}" if code else ""
            n_sent = truth.metrics()["truth:requests_total"]
            if self._watched_cpu_s - used_s >= 1.0:
                used_s, idle_from_s = self._watched_cpu_s, time.monotonic()
            if not n_sent and time.monotonic() - idle_from_s >= IDLE_S:
                return f"has sent nothing for {IDLE_S:.0f} s, in which it used no CPU"
        return f"has not ended after {limit_s:.0f} s"

    def _watch(self, pid: int, over: threading.Event) -> None:
        tree, family = ProcessTree(), ServingProcesses(keeper_pid=pid)
        tree.adopt([pid])
        while not over.wait(_PERIOD_S):
            tree.adopt(family.pids())
            self._watched_cpu_s = tree.read()["cpu_s"]
            self.pss_bytes = max(self.pss_bytes or 0.0, tree.pss_bytes() or 0.0) or None


def _argv(client: str | None, load: Load, truth: TruthRig, tokenizer: Path | None, out: Path) -> list[str]:
    spec = load.spec
    if client is None:
        ours = [sys.executable, "-m", "burstline", "run", "--engine", "truth", "--url", truth.url, "-q"]
        return [*ours, "--out", str(out), *words_of(spec, but=("salt",))]
    for row, _ in given(spec):
        if row.name not in _SAID or load.until_s is not None:
            raise WorkloadError(f"{row.flag} would be ignored: --client sends requests of its own")
    values = {
        "url": truth.url,
        "model": "truth",
        "requests": str(load.arrivals.n),
        "prompt_tokens": spec.prompt_tokens,
        "output_tokens": spec.output_tokens,
        "rate": f"{load.arrivals.rate_per_s:g}" if load.arrivals.rate_per_s else "inf",
        "concurrency": str(spec.concurrency or load.arrivals.n),
        "tokenizer": str(tokenizer),
        "out": str(out),
    }

    for word in _PLACE.findall(client):
        if word not in values:
            raise WorkloadError(f"--client: no value for {{{word}}}; there are {', '.join(values)}")
    try:
        words = shlex.split(client)
    except ValueError as error:
        raise WorkloadError(f"--client {client!r} is no command line: {error}") from None
    argv = [_PLACE.sub(lambda match: values[match[1]], word) for word in words]
    if "{url}" not in client:
        raise WorkloadError(f"--client {client!r} has no {{url}}: it would not find the server")
    return argv


def _printed_by(tool: str, reads: Mapping[str, str], out: Path) -> Printed:
    """What the client's files say, with a doubt for each thing that could not be read."""
    own = {out / name for name in _OWN}
    files = [path for path in sorted(out.rglob("*.json*")) if not own & {path, *path.parents}]
    names = ", ".join(str(path.relative_to(out)) for path in files[:8]) or "no JSON file"
    if reads:
        values, doubts = {}, []
        for name, place in reads.items():
            where = f"{files[0].relative_to(out)}#{place}" if len(files) == 1 and "#" not in place else place
            try:
                if "#" not in where:
                    raise WorkloadError(f"it wrote {names}; name one, as in {name}=FILE#{place}")
                values[name] = read_number(name, where, None, out)
            except WorkloadError as error:
                doubts.append(f"--reads {name}={place}: {error}.")
        return printed_of(tool, values, doubts=tuple(doubts), is_read=not doubts)
    results = []
    for path in files:
        with suppress(WorkloadError):
            results += [each for each in foreign_results(path) if each.whole]
    if len(results) == 1:
        return results[0]
    why = f"{len(results)} results are in {names}" if results else f"it wrote {names}, which is not known"
    doubt = f"Nothing that it printed was read: {why}; give --reads NAME=FILE#PLACE."
    return Printed(tool, None, None, {}, doubts=(doubt,), is_read=False)


def _ours(folder: Path) -> Printed:
    """Our own summary: latencies from the last byte written, as the server counts them."""
    run = open_run(folder)
    summary = run.summary
    assert summary is not None
    places: list[tuple[str, ...]] = [("throughput", name) for name in ("output_tok_per_s", "requests_per_s")]
    metrics = "ttft_service", "tpot", "itl", "e2e_service"
    places += [("metrics", metric, p) for metric in metrics for p in ("p50", "p90", "p99")]
    figures = {".".join(place).replace("_service", ""): summary.figure(*place) for place in places}
    numbers = {place: each.point for place, each in figures.items() if isinstance(each, Estimate)}
    n_ok = int(summary.counts.get("ok", 0))
    n_failed = int(summary.counts["planned"]) - n_ok
    defines = dict.fromkeys(("ttft", "e2e"), "from the request's last byte written")
    load = run.manifest.asked
    if load.concurrency is not None or load.rate is not None:
        defines["throughput"] = "over the run's window (docs/method.md), not the whole load"
    state, reason = withheld(summary.verdict, Use.CERTIFIED), next(iter(summary.verdict.reasons), None)
    doubts = (f"Its own verdict is {state}. {reason.text if reason else ''}".rstrip(),) if state else ()
    return Printed(f"burstline {run.manifest.version}", n_ok, n_failed, numbers, defines, doubts)
