"""Requests, wires and records made by hand, for tests."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, replace
from functools import cache
from typing import Any

import numpy as np
import orjson
import pyarrow as pa

from burstline.loadgen.capture.capture import Capture
from burstline.loadgen.capture.drive_report import DriveReport
from burstline.measure.metrics.slo import Slo
from burstline.measure.record.columns import Columns, columns_of
from burstline.measure.record.manifest import HostFacts, Manifest, ServerFacts
from burstline.measure.record.record import Record, record_of
from burstline.measure.record.summary import LACKING, Instrument, Summary
from burstline.measure.record.telemetry import Telemetry
from burstline.measure.record.verdict import State, Verdict
from burstline.measure.stats.estimates import label
from burstline.measure.stats.figure import Figure, measured
from burstline.measure.stats.quantiles import Samples, percentiles
from burstline.measure.summarize import summarize
from burstline.measure.verdict.judge import judge
from burstline.servers.identity import Identity
from burstline.servers.messages import Read
from burstline.workloads.arrivals import parse_arrival
from burstline.workloads.request import Request
from burstline.workloads.spec import LoadSpec
from tests.servers.golden import decode_completion

MS = 1_000_000
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
DONE = b"data: [DONE]\n\n"


def percentile(values: np.ndarray[Any, Any], p: float, unit: str) -> Figure:
    """Of values that are one a request."""
    return percentiles(Samples.per_request(values), (p,), unit)[label(p)]


def request(n_output_tok: int = 3, *, n_prompt_tok: int = 4, ignore_eos: bool = True) -> Request:
    return Request(0, (1,) * n_prompt_tok, None, n_prompt_tok, n_output_tok, ignore_eos)


def event(
    n_ids: int | None = None, *, text: str = "x", finish: str | None = None, usage: Any = None
) -> bytes:
    """One event of a completion; `n_ids` token ids, None where the server sends none."""
    choice = {"index": 0, "text": text, "finish_reason": finish}
    if n_ids is not None:
        choice["token_ids"] = [7] * n_ids
    answer: dict[str, Any] = {"choices": [choice]}
    if usage is not None:
        answer["usage"] = usage
    return b"data: " + orjson.dumps(answer) + b"\n\n"


def chat(**delta: Any) -> bytes:
    return (
        b"data: " + orjson.dumps({"choices": [{"index": 0, "delta": delta, "finish_reason": None}]}) + b"\n\n"
    )


def usage(n_output_tok: int, n_prompt_tok: int = 4) -> bytes:
    block = {"prompt_tokens": n_prompt_tok, "completion_tokens": n_output_tok}
    return b"data: " + orjson.dumps({"choices": [], "usage": block}) + b"\n\n"


def chunk(data: bytes) -> bytes:
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"


def wire(*events: tuple[int, bytes], head: bytes = HEAD, end: bytes = b"0\r\n\r\n") -> tuple[Read, ...]:
    """One read per event at so many ms, each in a chunk of its own; the head comes with the first."""
    parts = [(at_ms, chunk(data)) for at_ms, data in events] or [(0, b"")]
    (first_ms, first), *rest = parts
    parts = [(first_ms, head + first), *rest]
    parts[-1] = (parts[-1][0], parts[-1][1] + end)
    return tuple(Read(at_ms * MS, None, data) for at_ms, data in parts)


def capture(reads: Sequence[Read], failure: str | None = None, detail: str | None = None) -> Capture:
    """Due at 0, sent at 2 ms."""
    closed_ns = reads[-1].at_ns if reads else None
    return Capture(0, 0, 1 * MS, -5 * MS, 2 * MS, closed_ns, reads, failure, detail)


def recorded(asked: Request, *events: tuple[int, bytes], failure: str | None = None) -> Record:
    return record_of(asked, capture(wire(*events), failure), decode_completion)


@cache
def _one_token() -> Record:
    return recorded(request(1), (10, event(1, finish="length")), (10, usage(1)), (10, DONE))


def ok(index: int, first_s: float, gaps_s: Sequence[float], n: Sequence[int] | None = None) -> Record:
    """A success sent 1 ms after it was due at 0; `n` tokens in each event, one unless told."""
    ns = [round(first_s * 1e9)]
    for gap_s in gaps_s:
        ns.append(ns[-1] + round(gap_s * 1e9))
    n = [1] * len(ns) if n is None else list(n)
    return replace(
        _one_token(),
        index=index,
        sent_ns=MS,
        headers_ns=ns[0],
        closed_ns=ns[-1],
        answer_ns=ns[0],
        token_ns=ns,
        token_n=n,
        read_lag_ns=[0] * len(ns),
        read_error_ns=[0] * len(ns),
        planned_output_tok=sum(n),
        output_tok=sum(n),
    )


def failed(index: int, outcome: str = "timeout", planned_output_tok: int = 4) -> Record:
    record = recorded(request(planned_output_tok), failure=outcome)
    return replace(record, index=index, outcome=outcome, http_status=None, closed_ns=3 * MS)


def conditions(
    *,
    reports: Sequence[Any] = (),
    goals: Sequence[Slo] = (),
    arrivals: tuple[str, float] | None = None,
    telemetry: Telemetry | None = None,
    status: str = "complete",
    max_failures: float = 0.01,
    identity: Identity | None = None,
    **asked: Any,
) -> dict[str, Any]:
    """What `summarize` needs besides the records, of a run with these facts."""
    if arrivals is not None:
        asked |= {"arrival": parse_arrival(arrivals[0]), "rate": arrivals[1]}
    manifest = Manifest(
        engine="truth",
        workload="made",
        asked=LoadSpec(**asked),
        targets=tuple(goal.text for goal in goals),
        drivers=tuple(reports),
        identity=identity,
        max_failures=max_failures,
    )
    return {"manifest": manifest, "telemetry": telemetry, "status": status}


def summarized(records, given=None) -> dict[str, Any]:
    """The summary as summary.json has it."""
    columns = records if isinstance(records, Columns) else columns_of(records)
    return summarize(columns, **(given or conditions())).to_json()


def records_of(table: pa.Table) -> Iterator[Record]:
    """The records back; slow, for looking at a few."""
    names = [field.name for field in fields(Record)]
    for row in table.select(names).to_pylist():
        yield Record(**row)


def judged(
    counts: dict[str, int],
    grades: Any = None,
    *,
    canary_beyond_s: float | None = None,
    waited_fraction: float | None = None,
    throttled_fraction: float | None = None,
    others_cpu_fraction: float | None = None,
    server_cpu_s: Figure = LACKING,
    others_cpu: Mapping[str, float] | None = None,
    death: str = "",
    server_here: bool = False,
    max_failures: float = 0.01,
    cores_allowed: int | None = None,
    url: str | None = None,
    error_code: str | None = None,
    status: str = "complete",
    drivers: tuple[DriveReport, ...] = (),
    **rest: Any,
) -> Verdict:
    """The verdict on a run with these facts."""
    shares = {
        "canary_beyond_p99_s": canary_beyond_s,
        "client_cpu_wait_fraction": waited_fraction,
        "throttled_fraction": throttled_fraction,
        "others_cpu_fraction": others_cpu_fraction,
    }
    client = Instrument(
        **{name: measured(value, "1", "unknown") for name, value in shares.items()}, server_cpu_s=server_cpu_s
    )
    summary = Summary(
        counts=counts, metrics={}, verdict=Verdict(State.VALID), grades=grades or {}, instrument=client
    )
    manifest = Manifest(
        engine="truth",
        workload="made",
        max_failures=max_failures,
        error=death,
        error_code=error_code,
        host=HostFacts(cores_allowed=cores_allowed),
        server=ServerFacts(attached=not server_here, url=url),
        drivers=drivers,
        others_cpu=others_cpu,
    )
    return judge(summary, manifest, "failed" if death else status, **rest)
