"""The laboratory of `burstline certify`: a load generator, ours or another, at a server of known truth."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import psutil
from tokenizers import Tokenizer

from burstline.bench.load_options import Load
from burstline.bench.plan_for_server import ASSUMED
from burstline.loadgen.record.rundir import open_run
from burstline.loadgen.record.verdict import Use, withheld
from burstline.loadgen.stats.figure import Estimate
from burstline.loadgen.verdict.certificate import AskedLoad, Certificate, ClientCost, Printed, certificate
from burstline.loadgen.wire.os_limits import ensure_fd_limit
from burstline.models.model_folder import make_model
from burstline.reports.model.foreign import foreign_results
from burstline.servers.host.serving import ServingProcesses
from burstline.servers.host.sources import ProcessTree
from burstline.servers.host.wishes import allowed_cores, keep_to
from burstline.servers.redact import redacted, without_secrets
from burstline.servers.truth.rig import TruthRig, truth_server
from burstline.servers.truth.router import TruthSetup
from burstline.servers.truth.script import Script
from burstline.workloads.options import given, words_of
from burstline.workloads.request import WorkloadError

EVENTS_PER_S: Final = 20_000
"""As many tokens a second as a fast GPU streams; our truth server sends so many on time."""
GAP_S: Final = 0.01
TTFT_S: Final = 0.2
START_S, OUR_START_S = 900.0, 20.0
"""So much longer than its load a client may take: on a busy machine some import for minutes, ours never."""
_PERIOD_S: Final = 0.5
"""Between two samples of memory: the kernel holds up a process while it adds its pages."""
_PLACE: Final = re.compile(r"\{([a-z_]+)\}")
_SAID: Final = {
    *("requests", "prompt_tokens", "output_tokens", "rate", "arrival", "duration_s", "concurrency"),
    *("tokenizer", "salt"),
}
"""What of a load another client can be told."""
SCRIPTS: Final[Mapping[str, Callable[[Script, int], TruthSetup]]] = {
    "fixed": lambda own, _: TruthSetup((own,)),
    "queue": lambda own, n: TruthSetup((own,), slots=max(1, n // 4)),
    "bursts": lambda own, _: TruthSetup((replace(own, events_per_write=4),)),
    "slow-first-byte": lambda own, _: TruthSetup((replace(own, headers_s=2.0, ttft_s=2.0),)),
    "failing": lambda own, _: TruthSetup(
        (*[own] * 9, replace(own, status=503), *[own] * 9, replace(own, cut_after_tok=3)), cycle=True
    ),
}
"""By name what the server plays, of a script with fixed times and the number of connections."""


@dataclass(frozen=True, slots=True)
class Client:
    """A load generator by its command line.

    `reads` are places in its JSON file by the name of a number (`ttft.p50`), for a tool whose file is not
    known.
    """

    command: str
    reads: Mapping[str, str]


def setup_of(script: str, load: Load) -> TruthSetup:
    """What the server plays: its tokens share `EVENTS_PER_S` among all requests in flight, none sooner after
    another than `GAP_S`."""
    gap_s = max(GAP_S, load.n_connections / EVENTS_PER_S)
    return SCRIPTS[script](Script(ttft_s=TTFT_S, gaps_s=(gap_s,)), load.n_connections)


def certified(load: Load, script: str, client: Client | None, out: Path) -> Certificate:
    """Run the client, None: Burstline itself, at the server; its files go to `out`.

    WorkloadError where its command fails or its results cannot be read.
    """
    load = replace(load, spec=replace(load.spec, cancel_share=None))
    plan = load.plan(ASSUMED)
    asked = AskedLoad(
        title=load.title,
        n=len(plan.requests),
        prompt_tok=(load.shape.prompt_tok.low, load.shape.prompt_tok.high),
        due_s=None if load.spec.concurrency else np.array(plan.due_ns) / 1e9,
        concurrency=load.spec.concurrency,
    )
    setup = setup_of(script, load)
    longest_s = 2.0 + max(setup.scripts[0].gaps_s) * plan.longest_output_tok
    n_waves = asked.n / load.n_connections * (4 if setup.slots else 1)
    start_s = START_S if client else OUR_START_S
    limit_s = start_s + 2 * n_waves * longest_s + (0.0 if asked.due_s is None else float(asked.due_s.max()))
    ensure_fd_limit(load.n_at_once)
    cores = allowed_cores()
    with truth_server(setup) as truth:
        if truth.pid:
            keep_to(truth.pid, cores[:1])
        tokenizer = _tokenizer(client, load, out)
        argv = _argv(client, load, truth, tokenizer, out)
        truth.reset()
        ran = _Ran(argv, out / "tool.log", cores[1:], limit_s)
        rows = truth.log()
    if ran.code not in ((0,) if client else (0, 4)):  # ours says with 4 that a run is not VALID
        raise WorkloadError(
            f"the client ended with exit code {ran.code}: {shlex.join(without_secrets(argv))}\n"
            f"{_last_lines(out / 'tool.log')}"
        )
    printed = _printed_by(client, out)
    count = Tokenizer.from_file(str(tokenizer / "tokenizer.json")) if tokenizer else None
    counted = (lambda text: len(count.encode(text, add_special_tokens=False))) if count else None
    return certificate(rows, asked, script, printed, ran.cost, counted)


class _Ran:
    """A command, run to its end and watched; `log` is what it printed."""

    def __init__(self, argv: Sequence[str], log: Path, cores: Sequence[int], limit_s: float) -> None:
        loopback = "127.0.0.1,localhost"
        env = os.environ | {"NO_PROXY": loopback, "no_proxy": loopback}
        self._samples: list[tuple[float, float | None]] = []
        self._start_s = time.monotonic()
        with log.open("wb") as file:
            try:
                process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=file, stderr=file, env=env)
            except OSError as error:
                raise WorkloadError(f"--client: {argv[0]} cannot be started: {error}") from None
        keep_to(process.pid, cores)
        over = threading.Event()
        watcher = threading.Thread(target=self._watch, args=(process.pid, over), daemon=True)
        watcher.start()
        before_s = _children_s()
        try:
            self.code = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            raise WorkloadError(
                f"the client has not ended after {limit_s:.0f} s: {shlex.join(without_secrets(argv))}\n"
                f"{_last_lines(log)}"
            ) from None
        finally:
            if process.poll() is None:
                with suppress(psutil.NoSuchProcess):
                    for each in psutil.Process(process.pid).children(recursive=True):
                        each.kill()
                process.kill()
                process.wait()
            self._end_s = time.monotonic()
            over.set()
            watcher.join()
            clean = log.with_suffix(".partial")  # a tool prints its arguments, and the server's errors
            with log.open(errors="surrogateescape") as lines, clean.open("w", errors="surrogateescape") as to:
                to.writelines(map(redacted, lines))
            clean.replace(log)
        self._cpu_s = max(_children_s() - before_s, self._watched_cpu_s)

    def _watch(self, pid: int, over: threading.Event) -> None:
        tree, family, self._watched_cpu_s = ProcessTree(), ServingProcesses(keeper_pid=pid), 0.0
        tree.adopt([pid])
        while not over.wait(_PERIOD_S):
            tree.adopt(family.pids())
            self._watched_cpu_s = tree.read()["cpu_s"]
            self._samples.append((time.monotonic(), tree.pss_bytes()))

    def cost(self, first_s: float, last_s: float) -> ClientCost:
        """With the load's first and last moment, s on the monotonic clock."""
        pss = [pss_bytes for _, pss_bytes in self._samples if pss_bytes is not None]
        before_s, after_s = first_s - self._start_s, self._end_s - last_s
        return ClientCost(self._cpu_s, max(pss, default=None), before_s, after_s)


def _children_s() -> float:
    """CPU time of all that this process has started and waited for."""
    times = os.times()
    return times.children_user + times.children_system


def _tokenizer(client: Client | None, load: Load, out: Path) -> Path | None:
    """The folder of the tokenizer: the user's, or one made where the command names one."""
    if load.spec.tokenizer is not None:
        return Path(load.spec.tokenizer)
    return make_model(out / "model", "tiny") if client and "{tokenizer}" in client.command else None


def _argv(client: Client | None, load: Load, truth: TruthRig, tokenizer: Path | None, out: Path) -> list[str]:
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

    def value(match: re.Match[str]) -> str:
        if match[1] not in values:
            raise WorkloadError(f"--client: no value for {match[0]}; there are {', '.join(values)}")
        return values[match[1]]

    try:
        words = shlex.split(client.command)
    except ValueError as error:
        raise WorkloadError(f"--client {client.command!r} is no command line: {error}") from None
    if not words:
        raise WorkloadError("--client is empty; expected a command line with {url} in it")
    return [_PLACE.sub(value, word) for word in words]


def _printed_by(client: Client | None, out: Path) -> Printed:
    if client is None:
        return _ours(out)
    name = Path(shlex.split(client.command)[0]).name
    files = [path for path in sorted(out.rglob("*.json*")) if (out / "model") not in path.parents]
    if client.reads:
        if len(files) != 1:
            raise WorkloadError(
                f"--reads: {len(files)} JSON files in {out}; expected the command to write one"
            )
        return _read(name, files[0], client.reads)
    for path in files:
        with suppress(WorkloadError):
            found, *_ = foreign_results(path)
            n_failed = None if found.n_planned is None else found.n_planned - found.n_ok
            return Printed(found.tool, found.n_ok, n_failed, found.numbers, found.defines)
    return Printed(name, None, None, {}, {})


def _ours(out: Path) -> Printed:
    """Our own summary: latencies from the last byte written, as the server counts them."""
    (folder,) = (path.parent for path in out.glob("*/summary.json"))
    run = open_run(folder)
    summary = run.summary
    assert summary is not None
    numbers: dict[tuple[str, ...], float] = {}
    for metric, own in (("ttft", "ttft_service"), ("tpot", "tpot"), ("itl", "itl"), ("e2e", "e2e_service")):
        for p in ("p50", "p90", "p99"):
            figures = summary.metrics.get(own)
            if figures is not None and isinstance(figure := figures.figure(p), Estimate):
                numbers["metrics", metric, p] = figure.point
    for name in ("output_tok_per_s", "requests_per_s"):
        if isinstance(figure := summary.throughput.figure(name), Estimate):
            numbers["throughput", name] = figure.point
    n_ok = int(summary.counts.get("ok", 0))
    n_failed = int(summary.counts["planned"]) - n_ok
    defines = dict.fromkeys(("ttft", "e2e"), "from the request's last byte written")
    load = run.manifest.asked
    if load.concurrency is not None or load.rate is not None:
        defines["throughput"] = "over the run's window (docs/method.md), not the whole load"
    state, reason = withheld(summary.verdict, Use.CERTIFIED), next(iter(summary.verdict.reasons), None)
    doubt = f"Its own verdict is {state}. {reason.text if reason else ''}".rstrip() if state else ""
    return Printed(f"burstline {run.manifest.version}", n_ok, n_failed, numbers, defines, doubt)


_UNITS: Final = {"s": 1.0, "ms": 1e-3, "us": 1e-6}


def _read(tool: str, path: Path, reads: Mapping[str, str]) -> Printed:
    numbers: dict[tuple[str, ...], float] = {}
    counts: dict[str, int] = {}
    try:
        document = json.loads(path.read_bytes())
        for name, place in reads.items():
            where, _, unit = (
                place.rpartition(":") if place.rpartition(":")[2] in _UNITS else (place, "", "ms")
            )
            value = float(_at(document, where))
            if name in ("ok", "failed"):
                counts[name] = int(value)
            elif name.startswith("throughput."):
                numbers[tuple(name.split("."))] = value
            else:
                numbers["metrics", *name.split(".")] = value * _UNITS[unit]
    except (OSError, ValueError, TypeError, LookupError) as error:
        raise WorkloadError(f"--reads: {path} cannot be read: {error!r}") from None
    return Printed(tool, counts.get("ok"), counts.get("failed"), numbers, {})


def _at(document: Any, place: str) -> Any:
    """What lies at a dotted place; a number is an index of a list."""
    for key in place.removeprefix("$.").split("."):
        document = document[int(key)] if isinstance(document, list) else document[key]
    return document


def parse_reads(given: Sequence[str]) -> dict[str, str]:
    """`ttft.p50=results.ttft.median:ms` as the place by the number's name."""
    known = {
        f"{metric}.{p}" for metric in ("ttft", "ttfb", "tpot", "itl", "e2e") for p in ("p50", "p90", "p99")
    }
    known |= {"ok", "failed", "throughput.output_tok_per_s", "throughput.requests_per_s"}
    reads = {}
    for word in given:
        name, _, place = word.partition("=")
        if name not in known or not place:
            raise WorkloadError(
                f"--reads {word!r}: expected NAME=PLACE, with a NAME such as ttft.p50, itl.p99, e2e.p90, ok, "
                "failed or throughput.output_tok_per_s, and a PLACE such as results.ttft.median:ms"
            )
        reads[name] = place
    return reads


def _last_lines(log: Path) -> str:
    return "\n".join(log.read_text("utf-8", "replace").splitlines()[-5:])
