"""One driver: a process of its own that prepares requests, waits for the start, fires, and keeps captures.

The orchestrator starts it with `multiprocessing.get_context("spawn")` and talks to it over a pipe:

    driver -> ("ready",)         everything that can be prepared is; connections stand
    driver <- ("go", t0_ns)      absolute monotonic, shortly in the future
    driver <- ("stop",)          at any time: what is in flight ends "cancelled", the rest "not_sent"
    driver -> ("done", report)   every planned request has its capture on disk
    driver -> ("failed", error)  an exception, to be raised by whoever reads it

Nothing heavy is imported here: what is large in memory is the driver's own work.
"""

from __future__ import annotations

import asyncio
import gc
import os
import pickle
import signal
import threading
import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any

import httpx
import numpy as np
from asyncio_throttle.throttler import Throttler

from loadgen.driver.counters import Counters
from loadgen.driver.duration_histogram import Histogram
from loadgen.driver.job import DriveReport, Job
from loadgen.driver.os_limits import Usage, ensure_fd_limit, peak_rss_bytes, quiet
from loadgen.record.capture import NO_STAMP, Capture, Reads
from loadgen.record.capture_store import Spool
from loadgen.wire.exchange import Exchange
from loadgen.wire.transport import Transport
from servers.engine import Call
from servers.registry import ENGINES
from workloads.prompts import salted
from workloads.request import Request

_LOOK_AHEAD = 10_000
_NO_BODY = httpx.ByteStream(b"")
_HEADERS = {"accept": "*/*", "accept-encoding": "identity", "user-agent": "burstline"}


def run(job: Job, conn: Connection) -> None:
    """Do the job, talking over `conn`; the target of the driver's process. Never raises."""
    if threading.current_thread() is threading.main_thread():
        # Ctrl-C and SIGTERM reach a whole group; they are the orchestrator's to answer: it sends "stop".
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
    message: tuple[str, Any]
    try:
        message = ("done", asyncio.run(_Drive(job, conn).run()))
    except Exception as error:
        message = ("failed", _picklable(error))
    with suppress(OSError):  # the orchestrator is gone: the captures are on disk all the same
        conn.send(message)


class _Drive:
    def __init__(self, job: Job, conn: Connection) -> None:
        self._job, self._conn = job, conn
        self._engine = ENGINES[job.engine]
        self._base_url = job.target.url.rstrip("/")
        self._t0_ns: int | None = None
        self._n_prepared = 0
        self._failures: Counter[str] = Counter()
        self._late, self._lag = Histogram(), Histogram()

    async def run(self) -> DriveReport:
        job = self._job
        ensure_fd_limit(_n_connections(job))
        with Counters(job.counters) as counters:
            self._cells = counters.row(job.worker)
            transport = self._transport = Transport(
                job.target.url,
                barrier=True,
                deadline_s=job.deadline_s,
                concurrency=job.concurrency,
                counters=self._cells[1:],
            )
            self._spool = Spool(job.captures, job.worker, on_error=transport.stop)
            async with httpx.AsyncClient(
                transport=transport, headers=_HEADERS, trust_env=False
            ) as self._client:
                with self._listening(), quiet():
                    before = await self._fire()
            if transport.wire.error is not None:
                raise transport.wire.error
            self._spool.close()
            self._cells.release()
        return self._report(before)

    async def _fire(self) -> Usage:
        """Prepare, start at the agreed moment, and wait until every request has ended."""
        self._go = asyncio.Event()
        self._is_full = asyncio.Event()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._feed(tasks))
            await self._is_full.wait()
            await self._transport.opened(self._n_prepared)
            gc.collect()
            gc.freeze()
            before = Usage.now()
            with suppress(OSError):
                self._conn.send(("ready",))
            await self._go.wait()
        return before

    async def _feed(self, tasks: asyncio.TaskGroup) -> None:
        """Prepare each request before its time: all of them, or as many as the look-ahead holds."""
        job, traffic = self._job, self._transport.wire.traffic
        ahead = _LOOK_AHEAD if job.concurrency is None else min(_LOOK_AHEAD, 2 * job.concurrency + 64)
        throttler = _throttler(job.max_rate_per_s)
        for request, due_ns in zip(job.requests, job.due_ns, strict=True):
            if throttler is not None:
                self._is_full.set()
                await self._go.wait()
                async with throttler:
                    pass
            elif self._n_prepared - traffic.n_dispatched >= ahead:
                self._is_full.set()
            while self._n_prepared - traffic.n_dispatched >= ahead and not traffic.stopped:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            if self._n_prepared % 32 == 0:
                await asyncio.sleep(0)
            tasks.create_task(self._send(request, due_ns))
            self._n_prepared += 1
            self._cells[0] = self._n_prepared
        self._is_full.set()

    async def _send(self, request: Request, due_ns: int) -> None:
        exchange = Exchange(request.index, due_ns)
        if not self._transport.wire.traffic.stopped:
            with suppress(httpx.TransportError):  # the exchange knows what failed
                response = await self._client.send(self._built(request, exchange), stream=True)
                await response.aclose()
                response.stream = _NO_BODY  # httpx ties stream and response in a circle; no collector runs
        else:
            exchange.failure = "not_sent"
        exchange.payload, exchange.future = b"", None
        self._spool.put(lambda: self._captured(exchange))

    def _built(self, request: Request, exchange: Exchange) -> httpx.Request:
        job = self._job
        if job.salt is not None and job.vocabulary is not None:
            request = salted(request, job.salt, job.vocabulary)
        call: Call = self._engine.encode(request, job.target)
        return self._client.build_request(
            call.method,
            self._base_url + call.path,
            content=call.body,
            headers=list(call.headers),
            extensions={"exchange": exchange},
        )

    def _captured(self, exchange: Exchange) -> Capture:
        """The capture, counted. Runs in the spool's thread."""
        capture = exchange.capture(self._t0_ns or 0, self._transport.wire.offsets)
        if self._job.concurrency is not None and capture.dispatched_ns is not None:
            # In a closed loop a request is due when its turn comes: the plan cannot know when.
            capture = replace(capture, due_ns=capture.dispatched_ns)
        if capture.failure is not None:
            self._failures[capture.failure] += 1
        if capture.sent_ns is not None:
            self._late.add([capture.sent_ns - capture.due_ns])
        reads = Reads.of(capture.reads)
        self._lag.add((reads.at_ns - reads.kernel_ns)[reads.kernel_ns != NO_STAMP])
        return capture

    @contextmanager
    def _listening(self) -> Iterator[None]:
        """Obey the orchestrator meanwhile. When it is gone, stop: nobody waits for the load any more."""
        loop = asyncio.get_running_loop()

        def obey() -> None:
            try:
                name, *rest = self._conn.recv()
            except (EOFError, OSError):
                loop.remove_reader(self._conn.fileno())
                name, rest = "stop", []
            if name == "go":
                self._t0_ns = rest[0]
                self._transport.release(rest[0])
            else:
                self._transport.stop()
            self._go.set()

        loop.add_reader(self._conn.fileno(), obey)
        try:
            yield
        finally:
            loop.remove_reader(self._conn.fileno())

    def _report(self, before: Usage) -> DriveReport:
        wire, used = self._transport.wire, Usage.now() - before
        connect = Histogram()
        connect.add(wire.pool.connect_ns)
        return DriveReport(
            worker=self._job.worker,
            t0_ns=self._t0_ns,
            n_planned=len(self._job.requests),
            n_sent=wire.traffic.n_sent,
            n_resent=wire.traffic.n_resent,
            failures=dict(self._failures),
            late=self._late.spread(),
            read_lag=self._lag.spread(),
            connect=connect.spread(),
            max_pass_ns=wire.max_pass_ns,
            clock_offset_ns=wire.offsets.offset_ns[0],
            clock_drift_ns=wire.offsets.drift_ns,
            n_clock_steps=len(wire.offsets.offset_ns) - 1,
            n_reads=wire.n_reads,
            n_bytes=wire.n_bytes,
            cpu_s=used.cpu_s,
            wall_s=used.wall_s,
            peak_rss_bytes=peak_rss_bytes(),
            n_voluntary_switches=used.n_voluntary,
            n_involuntary_switches=used.n_involuntary,
            reader=wire.reader.name,
        )


def _throttler(max_rate_per_s: float | None) -> Throttler | None:
    """Lets `max_rate_per_s` requests start each second, or None.

    Good enough for a closed loop with a ceiling, where latency counts from dispatch. Never for open-loop
    arrivals: it polls, it lets a period's whole allowance go at once, and it counts from when it got round to
    it, so that the schedule would drift and the drift would not be seen.
    """
    if max_rate_per_s is None:
        return None
    n_per_period = max(1, round(max_rate_per_s / 20))
    period_s = n_per_period / max_rate_per_s
    return Throttler(rate_limit=n_per_period, period=period_s, retry_interval=min(0.01, period_s / 10))


def _n_connections(job: Job) -> int:
    """How many connections the job needs for certain: its concurrency, or all that is due within a second."""
    if job.concurrency is not None:
        return min(job.concurrency, len(job.requests))
    due_ns = np.frombuffer(job.due_ns, dtype=np.int64) if job.due_ns else np.zeros(0, dtype=np.int64)
    within = np.searchsorted(due_ns, due_ns + 1_000_000_000, side="right") - np.arange(len(due_ns))
    return int(within.max(initial=0))


def _picklable(error: Exception) -> Exception:
    if isinstance(error, ExceptionGroup):
        error = error.exceptions[0]
    try:
        pickle.loads(pickle.dumps(error))  # noqa: S301 our own bytes
    except Exception:
        return RuntimeError("".join(traceback.format_exception(error)))
    error.add_note(f"in driver process {os.getpid()}:\n{''.join(traceback.format_tb(error.__traceback__))}")
    return error
