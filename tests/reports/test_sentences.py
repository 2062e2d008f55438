"""Every kind of sentence that a user reads, in one table that can be reviewed: `tests/reports/sentences.txt`.

After a change of words: `python -m tests.reports.test_sentences` writes the table again; review its diff.
"""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from burstline.cli import main
from burstline.measure.metrics.audit import audit, audit_sentence, compared, misread, replies_differ
from burstline.measure.metrics.steady_state import ColdStart
from burstline.measure.record.decode import Reading
from burstline.measure.record.manifest import Manifest
from burstline.measure.record.summary import (
    Audit,
    Concurrency,
    Instrument,
    LengthFigures,
    LengthSummary,
    Memory,
    PrefixCache,
    Section,
    Stationarity,
    Summary,
)
from burstline.measure.record.verdict import Grade, PercentileGrade, Reason, State, Verdict
from burstline.measure.stats.estimates import Absent, Estimate
from burstline.measure.verdict.buffering import gathered
from burstline.measure.verdict.judge import caveats
from burstline.reports.model.comparison import Comparison
from burstline.reports.model.contenders import comparison_of
from burstline.reports.model.sweeps import sweeps_in
from burstline.reports.page.answer import answer
from burstline.reports.page.bottleneck import limit_of
from burstline.reports.page.digest import banner
from burstline.reports.page.limit_page import LimitResult, answer_of, limits_blocks
from burstline.reports.page.sweep_words import remarks
from burstline.reports.sentences import MEANT_BY, NEXT, SEARCH, SENTENCES, STATES
from burstline.servers.identity import Identity
from burstline.workloads.arrivals import parse_arrival
from burstline.workloads.spec import LoadSpec
from tests.burstline.test_limit import BOUNDS, FOUND, PROBES
from tests.measure.making import judged
from tests.measure.test_gathering import HELD, many
from tests.reports.synthetic_sweep import finished_run

TABLE = Path(__file__).parent / "sentences.txt"
ROOT = Path(__file__).parents[2]


def at(value_s: float) -> Estimate:
    return Estimate(value_s, None, None, None, 1, "s")


MANIFEST = Manifest(engine="vllm", workload="burst")
OK = {"planned": 1000, "ok": 1000}
LATE = {"ttft": {"p99": PercentileGrade(Grade("unreliable"), 0.0, 0.3)}}
UNKNOWN = {"ttft": {"p99": PercentileGrade(Grade("unreliable"), 0.0, None)}}
VERDICTS = (
    judged(OK, grades=LATE),
    judged(OK, grades=LATE, canary_beyond_s=0.2),
    judged(OK, grades=UNKNOWN),
    judged(OK, others_cpu_fraction=0.8, server_here=True),
    judged(OK, others_cpu_fraction=0.8, server_here=True, others_cpu={"python (pid 7)": 0.78}),
    judged(OK, others_cpu_fraction=0.8, server_here=True, others_cpu={"python (pid 7)": 0.08}),
    judged(OK, waited_fraction=0.3),
    judged(OK, throttled_fraction=0.02),
    judged({"planned": 200, "ok": 150, "reset": 50}),
    judged({"planned": 200, "ok": 3, "http_503": 197}, cause="503: too many requests"),
    judged({"planned": 200, "ok": 140, "refused": 60}, cause="429: the queue is full"),
    judged({"planned": 200, "ok": 140, "timeout": 60}),
    judged({"planned": 200, "ok": 140, "http_500": 60}, cause="500: out of memory"),
    judged({"planned": 200, "ok": 0, "http_400": 200}, cause="400: the prompt is too long"),
    judged({"planned": 200, "ok": 0, "connect": 200}),
    judged({"planned": 200, "ok": 20, "reset": 180}, death="The server was killed by signal 9"),
    judged(
        {"planned": 200, "ok": 49},
        death="Internal error at burstline/loadgen/wire/pool.py:280: IndexError: pop from empty list",
        error_code="client-failed",
    ),
    judged(OK, waited_fraction=0.3, cores_allowed=1, server_here=True),
    judged({"planned": 0, "ok": 0}),
)
CACHES = {
    "unplanned": PrefixCache(at(1000), at(0), replied_tok=at(120)),
    "unknown": PrefixCache(at(1000), at(500), at(400)),
    "warm": PrefixCache(at(1000), at(500), at(400), replied_tok=at(700)),
    "less": PrefixCache(at(1000), at(500), at(400), replied_tok=at(200)),
    "less than planned": PrefixCache(at(1000), at(500), replied_tok=at(200)),
    "none": PrefixCache(at(1000), at(500), at(400), replied_tok=at(0)),
    "none of the plan": PrefixCache(at(1000), at(500), replied_tok=at(0)),
    "restarted": PrefixCache(at(1000), at(500), at(400), replied_tok=at(300), restarted_s=at(2.5)),
    "relayed": PrefixCache(
        at(1000), at(500), at(400), replied_tok=at(300), restarted_s=replace(at(2.5), n=9)
    ),
}
REPLIES: dict[str, list[tuple[str, str, str]]] = {
    "none": [],
    "same": [("a", "a", "a")] * 20,
    "as alone": [("a", "a", "a")] * 20 + [("a", "b", "a")] * 3,
    "more": [("a", "a", "a")] * 297 + [("a", "b", "b")] * 3,
}
OURS = {k: Reading("abc", 3, "length", None, k) for k in range(9)}
SECOND = [
    compared("httpx 0.28.1", [replace(OURS[k], **other) for k in range(9)], OURS)
    for other in (
        {},
        {"n_tok": 4},
        {"finish_reason": "stop"},
        {"generated": "abd"},
        {"error": "ReadError: it ended"},
    )
]
SECOND.append(compared("httpx 0.28.1", [OURS[7]], {}))
MISTAKES = (
    "fly",
    "run --engine warp",
    "run --engine reference --bogus",
    "run --requests none",
    "run --requests 0",
    "run --arrival poisson",
    "run --slo ttft.p99",
    "run --slo speed.p99<=1s",
    "run --repeats 1",
    "run no-such.toml",
    "run --url 127.0.0.1:8000",
    "run --url http://127.0.0.1:8000 --audit 2% --temperature 0.7",
    "run --prompt-tokens 0",
    "run --trace no-such.jsonl",
    "compare no-such-run",
    "report no-such-run",
    "bound --model llama-2-7b --device abacus",
    "bound --model abacus --device a100-sxm4-80g",
)


def audits() -> Iterator[str]:
    yield from (audit_sentence(audit(replies)) for replies in REPLIES.values())
    yield from (audit_sentence(replace(audit(REPLIES["same"]), second_reader=each)) for each in SECOND)


def reasons() -> Iterator[Reason]:
    for verdict in VERDICTS:
        yield from verdict.reasons
    slow_start = ColdStart(10, 1.1, 0.4, 0.05, np.arange(10))
    yield from caveats(warned({"planned": 200, "ok": 20}), MANIFEST, "interrupted")
    yield from caveats(warned({"planned": 5, "ok": 5}), MANIFEST)
    yield from caveats(warned({"planned": 200, "ok": 199, "reset": 1}), MANIFEST)
    lengths = LengthSummary(
        output_tok=LengthFigures(served_mean=at(10)),
        prompt_mismatches=at(7),
        output_mismatches=at(7),
        hidden_tok=at(7),
        cut_behind=at(7),
        splits={"spread": 7, "no-text": 3},
        output_sources={"tokenizer": 7},
    )
    yield from caveats(warned(lengths=lengths), MANIFEST)
    off = replace(MANIFEST, identity=Identity("vllm", prefix_cache=False))
    for hits in CACHES.values():
        yield from caveats(warned(prefix_cache=hits), MANIFEST)
    yield from caveats(warned(prefix_cache=CACHES["none"]), off)
    for code in ("cold", "cold.warmed", "cold.probe"):
        yield from slow_start.counted({"p99": at(1.5)}, {"p99": at(0.41)}, 10, code)[1]
    yield from slow_start.counted({"p99": at(1.5)}, {"p99": at(0.41)}, 7)[1]
    yield slow_start.left_out()
    yield from replies_differ(audit(REPLIES["more"]))
    yield from (reason for each in SECOND for reason in misread(replace(Audit(), second_reader=each)))
    yield from caveats(warned(instrument=Instrument(others_cpu_fraction=at(0.8))), MANIFEST)
    held = {code: gathered(many(make)) for make, code in HELD.values()}
    yield from filter(None, held.values())


def warned(counts: dict[str, int] = OK, **sections: Section) -> Summary:
    return Summary(counts=counts, metrics={}, verdict=Verdict(State.VALID), **sections)


SHORT = Absent("the load was too short to watch", "too-short")
QUEUE = ("server_running_max", "server_waiting_mean")


def loaded(n: float, *queue: float, level: bool = False, kv: float = 0.4, reasons: str = "") -> Summary:
    """A run with `n` requests in flight; `queue`: how many ran at once, and how many waited on average."""
    known = dict(zip(QUEUE, map(at, queue), strict=bool(queue)))
    codes = tuple(Reason(code, "", "") for code in reasons.split())
    return Summary(
        counts=OK,
        metrics={},
        verdict=Verdict(State.NOT_STATIONARY if codes else State.VALID, codes),
        concurrency=Concurrency(mean=at(n / 2), max=at(n), **known),
        stationarity=Stationarity(in_flight_trend_p=at(0.5)) if level else Stationarity(),
        memory=Memory(kv_peak_fraction=at(kv), preemptions=at(12 if kv > 0.9 else 0)),
    )


def limits() -> Iterator[str]:
    burst = Manifest(engine="vllm", workload="burst", identity=Identity("vllm"))
    slots = replace(burst, identity=Identity("vllm", max_num_seqs=256))
    budget = replace(burst, identity=replace(slots.identity, max_num_batched_tokens=2048))
    rate = replace(burst, asked=LoadSpec(arrival=parse_arrival("poisson"), rate=20.0))
    users = replace(burst, asked=LoadSpec(concurrency=8))
    for manifest, summary in (
        (rate, loaded(5, level=True)),
        (rate, loaded(80, reasons="overloaded")),
        (rate, loaded(80, 8, 60.0, reasons="overloaded")),
        (users, loaded(8, 8, 0.0)),
        (users, loaded(8, 8, 1.2)),
        (users, loaded(8)),
        (burst, loaded(1)),
        (burst, loaded(64, 64, 12.0)),
        (burst, loaded(1000, 256, 400.0)),
        (slots, loaded(1000, 256, 400.0)),
        (slots, loaded(1000, 90, 400.0)),
        (slots, loaded(1000, 90, 400.0, kv=0.99)),
        (budget, loaded(1000, 241, 400.0)),
        (slots, replace(loaded(1000, 256, 400.0), counts={"planned": 1000, "ok": 700, "http_503": 300})),
        (slots, replace(loaded(1000, 256, 400.0), counts={"planned": 1000, "ok": 700, "http_500": 300})),
        (burst, replace(loaded(64), counts={"planned": 64, "ok": 57, "truncated": 4, "http_503": 3})),
        (burst, loaded(1000)),
        (
            burst,
            replace(loaded(9), concurrency=Concurrency(mean=at(5), max=at(9), server_waiting_mean=SHORT)),
        ),
        (burst, replace(loaded(9), verdict=Verdict(State.CLIENT_BOUND))),
        (users, replace(loaded(8), concurrency=Concurrency(mean=at(7), max=at(8), streaming_max=at(1)))),
    ):
        yield limit_of(summary, manifest)


def searches() -> Iterator[str]:
    result = LimitResult("vllm", "rate", tuple(b.text for b in BOUNDS), 600.0, FOUND, None, ())
    for found in (
        FOUND,
        replace(FOUND, high=None, more_requests=5000),
        replace(FOUND, low=None, high=None, best=None, probes=PROBES[1:], more_requests=4000),
        replace(FOUND, low=None, high=4.0, probes=PROBES[:1]),
        replace(FOUND, low=None, high=None, best=None, probes=PROBES[:1], more_requests=4000),
    ):
        said = answer_of(replace(result, found=found, more_s=90.0))
        yield from (said.sentence, *said.details)
    yield limits_blocks([("vllm, chat", "", result), ("tgi, chat", "", result)])[0].sentence


def mistakes() -> Iterator[str]:
    for words in MISTAKES:
        errors = io.StringIO()
        with contextlib.redirect_stderr(errors), contextlib.redirect_stdout(io.StringIO()):
            try:
                code = main(words.split())
            except SystemExit as ended:
                code = ended.code
        lines = [line for line in errors.getvalue().splitlines() if not line.startswith("See `")]
        listed = re.compile(r"(?:[\w.+-]+, ){4,}[\w.+-]+")  # engines, devices: more come, the sentence stays
        yield f"{words} -> {code}: {listed.sub('...', ' / '.join(lines))}"


def comparisons(folder: Path) -> Iterator[str]:
    pair = [
        finished_run(folder, engine, 120, speed=speed * noise, seed=k)
        for k, noise in enumerate((0.98, 1.0, 1.02))
        for engine, speed in (("vllm", 1.0), ("tgi", 1.35))
    ]
    unequal = finished_run(folder, "lightllm", 120, served_tok=9)
    targets = ("ttft.p90<=150ms", "tpot.p50<=12ms")
    loads = [finished_run(folder, "vllm", 140, concurrency=k, targets=targets) for k in (1, 8, 32)]
    strict = [finished_run(folder, "vllm", 140, concurrency=k, targets=("ttft.p90<=1ms",)) for k in (1, 8)]
    rates = [finished_run(folder, "vllm", n, rate=n / 8) for n in (40, 160, 900)]
    close = [
        finished_run(folder, engine, 60, speed=speed * noise, output_tok=64, seed=k)
        for k, noise in enumerate((0.99, 1.01, 1.03))
        for engine, speed in (("vllm", 1.0), ("lightllm", 0.93))
    ]
    compared = [comparison_of(runs, folder) for runs in (pair, pair[:2], [pair[0], unequal], close)]
    cases = [replace(each.cases[0], name=name) for each, name in zip(compared, "abcd", strict=True)]
    sweeps = [comparison_of(runs, folder) for runs in (loads, rates, rates[:2], strict, loads[:2])]
    suites = [Comparison("", tuple(cases[k] for k in kept)) for kept in ((0, 0), (0, 1), (1, 3))]
    for comparison in (*compared, *sweeps, *suites):
        said = answer(comparison)
        yield from (said.sentence, *said.details)
    for sweep, _ in (swept for comparison in sweeps for swept in sweeps_in(comparison.cases)):
        yield from remarks(sweep)
    for comparison in (compared[0], compared[3], sweeps[1]):
        shown = banner(comparison)
        yield f"{shown.state}: {shown.sentence}"
        yield from (reason.text for reason in shown.reasons)


def table() -> str:
    lines = ["# Verdicts", *(f"{state}: {text}" for state, (_, _, text) in STATES.items())]
    lines += [f"{code}: {text}" for code, text in MEANT_BY.items()]
    lines += ["", "# What limited the run", *limits()]
    lines += ["", "# Reasons and warnings: what happened | what to do"]
    lines += [f"{reason.code}: {reason.text} | {reason.advice}" for reason in reasons()]
    lines += ["", "# What to try next, by what limited a valid run", *NEXT.values()]
    lines += ["", "# What a search found", *searches()]
    lines += ["", "# What an audit found", *audits()]
    with TemporaryDirectory() as folder:
        lines += ["", "# Comparisons and sweeps", *comparisons(Path(folder))]
    lines += ["", "# Mistakes of a user -> exit code: the error", *mistakes()]
    return "\n".join(lines) + "\n"


def test_every_sentence_is_as_it_was_reviewed(monkeypatch, tmp_path) -> None:
    monkeypatch.chdir(tmp_path)
    assert table() == TABLE.read_text("utf-8")


def test_each_sentence_is_said_somewhere_by_its_code() -> None:
    paths = [path for path in (ROOT / "reports").rglob("*.py") if path.name != "sentences.py"]
    codes = {
        code for path in paths for code in re.findall(r"[\"']([a-z0-9.-]+)[\"']", path.read_text("utf-8"))
    }
    codes |= {code for *_, code in SEARCH.values()}
    assert SENTENCES.keys() - codes == set()


if __name__ == "__main__":
    TABLE.write_text(table(), "utf-8")
