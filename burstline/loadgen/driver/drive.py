"""A driver: a process that prepares requests, waits for the start, sends them, and stores captures.

A child (`burstline.servers.host.child`) that `burstline.bench.fire` talks to by the messages in `job.py`: it
gets a Job, answers Ready, and is told Go, perhaps End or Stop. Its last word is Done, or Failed, an exception
that the reader raises.

Three threads: this one prepares requests and listens to the orchestrator, the wire's sends and reads, the
spool's packs captures and writes them. Nothing heavy is imported: what is large in memory is the driver's own
work, and each import would delay the first request.
"""

import os
import signal
import threading
import time
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import islice
from multiprocessing.connection import Connection, wait
from typing import Final

import numpy as np

from burstline.loadgen.capture.capture import NO_STAMP, Capture, CaptureWriter, Reads, reply_limit_bytes
from burstline.loadgen.capture.drive_report import DriveReport
from burstline.loadgen.capture.http1 import body_of
from burstline.loadgen.driver import canary
from burstline.loadgen.driver.conversations import NO_IDS, PREDECESSOR, Conversations
from burstline.loadgen.driver.job import Counters, Done, End, Go, Job, Ready, Stop
from burstline.loadgen.driver.self_measurement import CanaryErrors, DurationHistogram
from burstline.loadgen.wire.exchange import Exchange
from burstline.loadgen.wire.os_limits import Usage, ensure_sockets, peak_rss_bytes, quiet
from burstline.loadgen.wire.wire import Wire
from burstline.servers.destination import Destination
from burstline.servers.host.child import Failed
from burstline.servers.messages import WITH_TOKENS, HttpReply
from burstline.servers.openai import reply_content
from burstline.servers.registry import ENGINES
from burstline.workloads.due_times import most_open
from burstline.workloads.prompts import salted
from burstline.workloads.request import Request

_LOOK_AHEAD: Final = 10_000
"""The number of requests prepared before they are due: all of a burst, a part of a long run."""
_POLL_S: Final = 0.01
ABANDONED: Final = "abandoned"
"""How an exchange ends whose client was to hang up; an `Outcome` of a record has this name."""
WITHOUT_IDS: Final = "the reply has no token ids for the next turn's prompt: pass --endpoint chat"
_OPENING_S: Final = 60.0
"""How long opening connections may delay the start; what lacks one then waits within its own deadline."""

Due = tuple[Request, int]


def main(home: Connection, job: Job) -> None:
    # Ctrl-C and SIGTERM reach a whole group; they are the orchestrator's to answer: it sends Stop.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    run(job, home)


def run(job: Job, conn: Connection) -> None:
    """Do the job, talking over `conn`. Never raises."""
    message: Done | Failed
    try:
        message = Done(_Drive(job, conn).run())
    except Exception as error:
        message = Failed.of(error)
    with suppress(OSError):  # the orchestrator is gone: the captures are on disk all the same
        conn.send(message)


class _Drive:
    def __init__(self, job: Job, conn: Connection) -> None:
        self._job, self._conn = job, conn
        self._engine = ENGINES[job.engine]
        self._destination = Destination.of(job.target)
        self._t0_ns: int | None = None
        self._stopped = False
        self._n_prepared = self._n_ended = 0
        self._canary = CanaryErrors()
        self._failures: Counter[str] = Counter()
        self._late, self._lag = DurationHistogram(), DurationHistogram()
        self._sessions: Conversations | None = None
        if job.requests and job.requests[0].turn is not None:
            self._sessions = Conversations(job.requests, job.due_ns, job.concurrency)
        self._turns_ended: deque[Exchange] = deque()

    def run(self) -> DriveReport:
        job = self._job
        ensure_sockets(_n_connections(job))
        # By this event other threads wake this one.
        event = os.fdopen(os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK), "wb")
        with Counters(job.counters) as counters, event:
            self._news = event.fileno()
            self._cells = counters.row(job.worker)
            wire = self._wire = Wire(
                self._destination.addresses(),
                self._on_ended,
                tls=self._destination.tls(),
                host=self._destination.host,
                deadline_s=job.deadline_s,
                concurrency=None if self._sessions else job.concurrency,
                until_s=job.until_s,
                counters=self._cells[1:],
            )
            self._spool = CaptureWriter(job.captures, job.worker, on_error=self._stop)
            wire.start()
            if job.canary_port is not None:
                asked = Exchange(canary.INDEX)
                asked.payload = canary.REQUEST
                wire.watch_canary(asked, job.canary_port, self._on_canary)
            try:
                with quiet():
                    before = self._fire()
            finally:
                wire.close()
            for exchange in self._turns_ended:  # no turn follows them any more
                self._keep(exchange)
            self._spool.close()  # first: what was captured is kept, whatever went wrong
            self._cells.release()
            if wire.error is not None:
                raise wire.error
        return self._report(before)

    # The thread that prepares and listens.

    def _fire(self) -> Usage:
        """Prepare, start at the agreed moment, and wait until every request has ended."""
        job = self._job
        due: Iterator[Due] = zip(job.requests, job.due_ns, strict=True)
        if self._sessions is not None:
            due = self._sessions.opening()
        ahead = _LOOK_AHEAD if job.concurrency is None else min(_LOOK_AHEAD, 2 * job.concurrency + 64)
        self._prepare(islice(due, ahead))
        self._await_connections()
        before = Usage.now()
        with suppress(OSError):
            self._conn.send(Ready())
        while self._t0_ns is None and not self._stopped and self._is_running:
            self._listen(1.0)
        while batch := list(islice(due, self._await_room(ahead))):
            if self._is_over and self._sessions is None:  # what has no capture was not sent
                break
            self._prepare(batch)
            self._converse()
        while (self._turns_ended or self._n_ended < self._n_prepared) and self._is_running:
            if not self._turns_ended:
                self._listen(1.0)
            self._converse()
        return before

    def _converse(self) -> None:
        """Prepare the turns that follow those that have ended; of a failed one none is ever sent."""
        sessions = self._sessions
        while sessions is not None and self._turns_ended:
            exchange = self._turns_ended.popleft()
            end_ns = exchange.capture(self._t0_ns or 0, self._wire.offsets).closed_ns or 0
            # Decoding takes 2 us an event, for which the next session's first turn need not wait.
            needed = sessions.is_followed(exchange.index) and not self._stopped
            reply = _reply(exchange) if needed and exchange.failure is None else None
            content = reply_content(reply) if reply is not None and reply.ok else None
            by_ids = self._job.requests[0].prompt_ids is not None
            lacks_ids = content is not None and content.ids is None and by_ids
            due, skipped = sessions.ended(exchange.index, end_ns, None if lacks_ids else content)
            why = (NO_IDS, WITHOUT_IDS) if lacks_ids else (PREDECESSOR, "an earlier turn failed")
            for each in due:
                self._prepare([each])
            self._keep(exchange)
            for request, at_ns in skipped:
                never = Exchange(request.index, at_ns)
                never.failure, never.detail = why
                self._n_prepared += 1
                self._on_ended([never])

    def _n_tokens(self, exchange: Exchange) -> int:
        """How many tokens a reply that streams has brought so far; an event of unknown size counts as one."""
        if (reply := _reply(exchange)) is None:
            return 0
        events = self._engine.decode(reply).events
        return sum(event.n_tok or 1 for event in events if event.kind in WITH_TOKENS and event.n_tok != 0)

    def _prepare(self, due: Iterable[Due]) -> None:
        """Build requests, then hand them to the wire; after a stop they only get their captures.

        All together: while this thread runs, the wire's waits for the GIL at each of its system calls.
        """
        exchanges = []
        for request, due_ns in due:
            if self._n_prepared % 32 == 0:
                self._listen(0.0)
            exchanges.append(self._exchange(request, due_ns))
            self._n_prepared += 1
            self._cells[0] = self._n_prepared
        self._wire.park(*exchanges)  # a wire that was stopped ends them "not_sent"

    def _exchange(self, request: Request, due_ns: int) -> Exchange:
        if self._sessions is not None and self._job.salt and self._job.vocabulary is not None:
            request = salted(request, self._job.salt, self._job.vocabulary)
            self._sessions.sent(request)
        exchange = Exchange(request.index, due_ns)
        exchange.max_bytes = reply_limit_bytes(request.n_prompt_tok, request.n_output_tok)
        if not self._is_over:
            exchange.payload = self._destination.serialised(self._job.call(request, self._engine))
            exchange.hang_up_at = self._job.hang_ups.get(request.index)
            if exchange.hang_up_at is not None:
                exchange.hang_up_as, exchange.n_tokens = ABANDONED, self._n_tokens
            else:
                exchange.hang_up_at = self._engine.hang_up_at(request)
        return exchange

    def _await_room(self, ahead: int) -> int:
        """Hold back while as many requests are prepared as the look-ahead allows; how many more may be.

        At most half of it at a time: the wire gets the first before it has sent what it has.
        """
        while (n_free := self._wire.traffic.n_dispatched + ahead - self._n_prepared) < 1:
            if self._is_over or not self._is_running:
                return 1
            self._listen(_POLL_S)
            self._converse()  # turns that follow do not wait until every session has begun
        return 1 if self._sessions else min(n_free, -(-ahead // 2))

    def _await_connections(self) -> None:
        """Until all that is due in the first second has its connection, a stop, or the limit."""
        opened = threading.Event()

        def open_now() -> None:
            opened.set()
            self._wake()

        self._wire.when_open(open_now)
        until_s = time.monotonic() + _OPENING_S
        while not opened.is_set() and not self._stopped and self._is_running and time.monotonic() < until_s:
            self._listen(_POLL_S)

    def _listen(self, timeout_s: float) -> None:
        """Obey the orchestrator, for so long or until this thread is woken.

        When the orchestrator is gone, stop: no process waits for the load any more.
        """
        self._cells[-1] += 1
        heard = wait([self._news] if self._conn.closed else [self._news, self._conn], timeout_s)
        if self._news in heard:
            with suppress(BlockingIOError):
                os.eventfd_read(self._news)
        if self._conn not in heard:
            return
        try:
            message = self._conn.recv()
        except (EOFError, OSError):
            self._conn.close()
            message = Stop()
        match message:
            case Go(t0_ns):
                self._t0_ns = t0_ns
                self._wire.release(t0_ns)
            case End():
                self._wire.end()
            case _:
                self._stop()

    @property
    def _is_running(self) -> bool:
        return self._wire.error is None

    @property
    def _is_over(self) -> bool:
        """Whether nothing more is sent: what is prepared now only gets its capture."""
        return self._stopped or self._wire.traffic.over

    # Called by any thread.

    def _stop(self) -> None:
        self._stopped = True
        self._wire.stop()
        self._wake()

    def _wake(self) -> None:
        with suppress(OSError):  # closed: nothing more is awaited
            os.eventfd_write(self._news, 1)

    def _on_ended(self, ended: list[Exchange]) -> None:
        """Runs in the wire's thread: the captures are made and packed in the spool's.

        That of a turn is made when the next turn has been prepared, which would else wait for the GIL.
        """
        for exchange in ended:
            if self._sessions is not None and exchange.failure not in (PREDECESSOR, NO_IDS):
                self._turns_ended.append(exchange)
            else:
                self._keep(exchange)
        self._n_ended += len(ended)
        if self._sessions is not None or self._n_ended >= self._n_prepared:
            self._wake()

    def _keep(self, exchange: Exchange) -> None:
        self._spool.put(lambda: self._captured(exchange))

    def _captured(self, exchange: Exchange) -> Capture:
        """The capture, counted. Runs in the spool's thread, also once all has ended: a sign of life."""
        self._cells[-1] += 1
        capture = exchange.capture(self._t0_ns or 0, self._wire.offsets)
        closed = self._job.concurrency is not None and self._sessions is None
        if closed and capture.dispatched_ns is not None:
            # In a closed loop a request is due when its turn comes: the plan cannot know when.
            capture = replace(capture, due_ns=capture.dispatched_ns)
        if capture.failure is not None:
            self._failures[capture.failure] += 1
        if capture.sent_ns is not None:
            self._late.add([capture.sent_ns - capture.due_ns])
        reads = Reads.of(capture.reads)
        self._lag.add((reads.at_ns - reads.kernel_ns)[reads.kernel_ns != NO_STAMP])
        return capture

    def _on_canary(self, said: Exchange) -> None:
        """Runs in the wire's thread; the spool's counts the errors in this part of the canary's stream."""

        def count() -> None:
            if self._t0_ns is not None and said.data:
                capture = said.capture(self._t0_ns, self._wire.offsets)
                self._canary.add(capture, self._t0_ns)

        self._spool.put(count)

    def _report(self, before: Usage) -> DriveReport:
        wire, used = self._wire, Usage.now() - before
        n_unprepared = 0 if self._sessions else len(self._job.requests) - self._n_prepared
        connect = DurationHistogram()
        connect.add(wire.pool.connect_ns)
        return DriveReport(
            worker=self._job.worker,
            t0_ns=self._t0_ns,
            n_planned=len(self._job.requests),
            n_sent=wire.traffic.n_sent,
            n_resent=wire.traffic.n_resent,
            failures=dict(self._failures + Counter(not_sent=n_unprepared)),
            late=self._late.spread(),
            read_lag=self._lag.spread(),
            connect=connect.spread(),
            max_pass_ns=wire.max_pass_ns,
            clock_drift_ns=wire.offsets.drift_ns,
            n_clock_steps=len(wire.offsets.offset_ns) - 1,
            n_reads=wire.reader.n_reads,
            n_bytes=wire.reader.n_bytes,
            cpu_s=used.cpu_s,
            wall_s=used.wall_s,
            peak_rss_bytes=peak_rss_bytes(),
            n_involuntary_switches=used.n_involuntary,
            cpu_wait_s=wire.cpu_wait_s,
            canary=self._canary.report() if self._job.canary_port is not None else None,
            network=wire.network.report(),
        )


def _reply(exchange: Exchange) -> HttpReply | None:
    if (head := exchange.head) is None:
        return None
    return HttpReply(head.status, dict(head.headers), body_of(head, exchange.whole()[1]))


def _n_connections(job: Job) -> int:
    """How many connections the job needs for certain: its concurrency, or all that is due within a second."""
    if job.concurrency is None and any(request.turn for request in job.requests[:1]):
        return sum(not request.turn.after for request in job.requests if request.turn)
    return most_open(np.asarray(job.due_ns, dtype=np.int64) / 1e9, job.concurrency, 1.0)
