"""Send a plan: start the drivers at one moment, monitor them and the server, and stop them on request."""

import os
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import wait
from typing import Final

from burstline.bench.progress import Snapshot
from burstline.bench.server_session import Say, Site
from burstline.loadgen.capture.capture import Capture, CaptureWriter, read_captures
from burstline.loadgen.capture.drive_report import DriveReport, LostDriver
from burstline.loadgen.driver.job import (
    NAMES,
    Counters,
    Done,
    Driver,
    End,
    Go,
    Job,
    Ready,
    Stop,
    local_drivers,
)
from burstline.measure.record.record import Outcome
from burstline.servers.host.child import ChildLostError
from burstline.servers.host.interrupt import uninterrupted
from burstline.servers.host.ready import PAGE_TIMEOUT_S, getter
from burstline.servers.introspection import log_message
from burstline.servers.messages import EngineError

LEAD_S = 0.05
"""From the last driver's "ready" to the run's start: time for every driver to hear of it."""
CLUSTER_LEAD_S = 1.0
"""The same over a cluster: a message to each of hundreds of workers takes milliseconds."""
TICK_S = 0.25
STARTING_LIMIT_S: Final = 30.0
"""How long a driver may take to its first sign of life: it imports, and reads its job."""
STILL_LIMIT_S: Final = 10.0
"""How long a driver may show no sign of life after that: stopped, or its machine or its disk hangs."""
STOPPING_LIMIT_S: Final = 5.0
"""The same once it was asked to stop, and somebody waits for it."""

OnTick = Callable[[Snapshot], None]
Enough = Callable[[Snapshot], bool]
"""Whether a load may end before its plan does."""
OnPids = Callable[[list[int]], None]
Drivers = Callable[[Sequence[Job], Counters], AbstractContextManager[Sequence[Driver]]]
"""Starts one driver for each job."""


@dataclass(frozen=True, slots=True)
class DriveOutcome:
    """How a load went: the drivers' own reports, the start (ns, monotonic), and why drivers are missing.

    `lost` are the drivers that ended during the load; `error` is what a driver failed of. `ended_s` is when
    the load had said enough.
    """

    reports: list[DriveReport]
    interrupted: bool
    t0_ns: int | None = None
    lost: tuple[LostDriver, ...] = ()
    error: Exception | None = None
    ended_s: float | None = None


def fire(
    job: Job,
    n_workers: int,
    on_pids: OnPids,
    on_tick: OnTick,
    drivers: Drivers | None = None,
    say: Say = lambda _: None,
    enough: Enough = lambda _: False,
) -> DriveOutcome:
    """Drive the whole job, by processes of this machine unless `drivers` starts others.

    `say` is called with each driver that is lost during the load. Once `enough` is true nothing more is sent,
    and what is in flight ends by itself.

    An interrupt asks the drivers to stop, so that all that was sent still gets its capture; a second one is
    raised. Requests of a driver that is lost during the load are captured as `driver_lost`. Raises
    ChildLostError where nothing was sent.
    """
    parts = job.split(n_workers) if n_workers > 1 else [job]
    try:
        with (
            Counters.create(job.counters, n_workers) as counters,
            (drivers or local_drivers)(parts, counters) as started,
        ):
            on_pids([driver.pid for driver in started if driver.pid])
            early_s = max(0.0, -job.due_ns[0] / 1e9) if job.due_ns else 0.0
            load = _DriverControl(started, counters, parts, on_tick, early_s, say, enough).attend()
    finally:
        job.counters.unlink(missing_ok=True)
    captured = {capture.index for capture in read_captures(job.captures)} if load.lost else set()
    for each in load.lost:
        part, how = parts[each.worker], (None, None, None, None, (), Outcome.DRIVER_LOST, each.why)
        spool = CaptureWriter(job.captures, n_workers + each.worker)
        for request, due_ns in zip(part.requests, part.due_ns, strict=True):
            if request.index not in captured:
                spool.put(partial(Capture, request.index, due_ns, *how))
        spool.close()
    return load


class _DriverControl:
    """Listens to the drivers until each has reported or is lost."""

    def __init__(
        self,
        drivers: Sequence[Driver],
        counters: Counters,
        parts: Sequence[Job],
        on_tick: OnTick,
        early_s: float,
        say: Say,
        enough: Enough,
    ) -> None:
        self._pending = dict(enumerate(drivers))
        self._counters, self._on_tick, self._say, self._enough = counters, on_tick, say, enough
        self._shares = [len(part.requests) for part in parts]
        self._n_unready = len(drivers)
        # What leads into the load is due before the run's start.
        self._lead_s = early_s + (LEAD_S if all(driver.pid for driver in drivers) else CLUSTER_LEAD_S)
        self._reports: list[DriveReport] = []
        self._t0_ns: int | None = None
        self._lost: list[LostDriver] = []
        self._error: Exception | None = None
        self._interrupted = False
        self._ended_s: float | None = None
        self._stopped_s: float | None = None
        self._beats = {k: (0, time.monotonic()) for k in self._pending}

    def attend(self) -> DriveOutcome:
        while self._pending:
            try:
                connections = {driver.connection: k for k, driver in self._pending.items()}
                heard = wait(list(connections), timeout=TICK_S)
                with uninterrupted():  # a message that was read half would garble all that follow
                    for k in [k for connection, k in connections.items() if connection in heard]:
                        self._hear(k)
                    self._check_limits()
                if self._t0_ns is not None:
                    totals = self._counters.totals()
                    elapsed_s = max(0.0, (time.monotonic_ns() - self._t0_ns) / 1e9)
                    sent, begun, done, failed = (totals[name] for name in ("sent", "begun", "done", "failed"))
                    now = Snapshot(
                        sum(self._shares), sent, begun, done, failed, elapsed_s, totals["bytes"],
                        unsent=totals["unsent"],
                    )  # fmt: skip
                    self._on_tick(now)
                    if self._ended_s is None and self._stopped_s is None and self._enough(now):
                        self._ended_s = (time.monotonic_ns() - self._t0_ns) / 1e9
                        self._tell(End())
            except KeyboardInterrupt:
                if self._interrupted:
                    raise
                self._interrupted = True
                self._stop()
        reports, lost = sorted(self._reports, key=lambda report: report.worker), tuple(self._lost)
        return DriveOutcome(reports, self._interrupted, self._t0_ns, lost, self._error, self._ended_s)

    def _hear(self, k: int) -> None:
        try:
            message = self._pending[k].receive()
        except ChildLostError as error:
            self._lose(k, str(error))
            return
        except Exception as error:  # the driver's own
            self._error = self._error or error
            del self._pending[k]
            self._stop()
            return
        match message:
            case Ready():
                self._n_unready -= 1
                if self._n_unready == 0 and self._stopped_s is None:
                    self._t0_ns = time.monotonic_ns() + int(self._lead_s * 1e9)
                    self._tell(Go(self._t0_ns))
            case Done(report):
                self._reports.append(report)
                del self._pending[k]

    def _lose(self, k: int, why: str) -> None:
        del self._pending[k]
        if self._t0_ns is None and self._stopped_s is None:
            raise ChildLostError(f"{why}; nothing was sent")
        n_sent = self._counters.row(k)[NAMES.index("sent")]
        why = f"{why}; {n_sent:,} of its {self._shares[k]:,} requests had been sent"
        at_s = self._beats[k][1] - self._t0_ns / 1e9 if self._t0_ns else 0.0  # nothing is known of it since
        self._lost.append(LostDriver(k, max(0.0, at_s), why, self._shares[k] / sum(self._shares)))
        self._say(why)

    def _check_limits(self) -> None:
        """A driver that shows no sign of life, or does not stop, is lost."""
        at_s, stopped_s = time.monotonic(), self._stopped_s
        for k, driver in list(self._pending.items()):
            n_beats = self._counters.row(k)[NAMES.index("beats")]
            if n_beats != self._beats[k][0]:
                self._beats[k] = n_beats, at_s
            limit_s = STILL_LIMIT_S if n_beats else STARTING_LIMIT_S
            if stopped_s is not None:
                limit_s = STOPPING_LIMIT_S
            if at_s - max(self._beats[k][1], stopped_s or 0.0) > limit_s:
                if driver.pid is not None:
                    os.kill(driver.pid, signal.SIGKILL)
                how = "did not stop" if stopped_s is not None else f"made no progress for {limit_s:g} s"
                self._lose(k, f"{driver.name} {how}")

    def _stop(self) -> None:
        self._stopped_s = self._stopped_s or time.monotonic()
        self._tell(Stop())

    def _tell(self, message: Go | End | Stop) -> None:
        for driver in self._pending.values():
            driver.send(message)


SILENCE_S = 20.0
"""Report a silence of all streams after this time: an engine may not notice that its model process died."""


class VitalSigns:
    """Looks at every snapshot of a load; `died_s` is when the server's process was seen to have ended."""

    def __init__(self, site: Site, say: Say) -> None:
        self.died_s: float | None = None
        self.silences: list[str] = []
        self._site, self._say = site, say
        self._n_bytes, self._since_s = -1, 0.0
        self._n_lost = self._n_failed = 0
        self._failing: tuple[float, int] | None = None

    def look(self, now: Snapshot) -> None:
        """Tell a death at once, and a silence once it has lasted SILENCE_S."""
        n_open = now.sent - now.done - now.failed
        server = self._site.server
        is_dead = self.died_s is None and server is not None and not server.alive()
        if self.died_s is None and server is not None and now.failed > self._n_failed:
            is_dead = is_dead or self._site.engine.dead(server.log()) is not None
        if now.failed > self._n_failed:
            self._failing = self._failing or (now.elapsed_s, self._n_failed)
        elif n_open > 0:
            self._failing = None
        self._n_failed = now.failed
        if is_dead:
            # What failed since it was last seen to serve, it took with it.
            n_failed_before = self._failing[1] if self._failing else now.failed
            self.died_s, self._n_lost = now.elapsed_s, max(n_open, 0) + now.failed - n_failed_before
            self._say(self.death() or "")
        if now.n_bytes != self._n_bytes or n_open <= 0:
            self._n_bytes, self._since_s = now.n_bytes, now.elapsed_s
        elif now.elapsed_s - self._since_s >= SILENCE_S:
            self._since_s = float("inf")  # told once, until something comes
            self.silences.append(self._silence(n_open))
            self._say(self.silences[-1])

    def death(self) -> str | None:
        """That the server died, when, its last words, and what it took with it; None while it lives.

        A server whose launcher lives is dead too where its log says that its engine is.
        """
        server, engine = self._site.server, self._site.engine
        if server is None:
            return None
        if server.alive():
            cause, how = engine.dead(server.log()), "while its launcher is still running"
            if cause is None:
                return None
        else:
            cause = engine.dead(server.log()) or engine.root_cause(server.log())
            cause = cause or f"its log ends: {log_message(server.last_line()) or '(empty)'}"
            how = server.how_it_ended().removeprefix("was ")
        died_s, n_lost = self.died_s, self._n_lost
        if died_s is None and not server.alive() and self._failing is not None:
            # The last requests failed while its process was still ending.
            died_s, n_failed_before = self._failing
            n_lost = self._n_failed - n_failed_before
        when = "during the load" if died_s is None else f"{died_s:.1f} s into the load"
        lost = f" with {n_lost:,} open requests" if n_lost else ""
        return f"{engine.title} died {when}{lost}, {how}; {cause}"

    def _silence(self, n_open: int) -> str:
        text = f"No token from any of {n_open:,} streams for {SILENCE_S:g} s"
        path = self._site.engine.probe_path
        if path is None:
            return text
        try:
            status = getter(self._site.target, timeout_s=PAGE_TIMEOUT_S)(path).status
        except EngineError:
            return f"{text}; {path} does not answer either"
        return f"{text}; the server still says healthy ({path} answers {status})"
