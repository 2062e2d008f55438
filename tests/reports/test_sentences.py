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

from burstline.cli import main
from burstline.loadgen.metrics.steady_state import ColdStart
from burstline.loadgen.record.manifest import ArrivalFacts, Manifest
from burstline.loadgen.record.summary import Concurrency, Memory, MetricFigures, Stationarity, Summary
from burstline.loadgen.record.verdict import Grade, PercentileGrade, Reason, State, Verdict
from burstline.loadgen.stats.estimates import Absent, Estimate
from burstline.loadgen.verdict import warnings
from burstline.loadgen.verdict.judge import Evidence, judge
from burstline.reports.model.comparison import Comparison
from burstline.reports.model.contenders import comparison_of
from burstline.reports.model.sweeps import sweeps_in
from burstline.reports.page.answer import answer, limit_of
from burstline.reports.page.banner import banner
from burstline.reports.page.side_by_side import findings
from burstline.reports.page.sweep_words import findings_of, remarks
from burstline.reports.sentences import MEANT_BY, SENTENCES, STATES
from burstline.servers.identity import Identity
from tests.reports.synthetic_sweep import finished_run

TABLE = Path(__file__).parent / "sentences.txt"
ROOT = Path(__file__).parents[2]


def at(value_s: float) -> Estimate:
    return Estimate(value_s, None, None, None, 1, "s")


OK = {"planned": 1000, "ok": 1000}
LATE = {"ttft": {"p99": PercentileGrade(Grade("unreliable"), 0.0, 0.3)}}
UNKNOWN = {"ttft": {"p99": PercentileGrade(Grade("unreliable"), 0.0, None)}}
EVIDENCE = (
    Evidence(OK, grades=LATE),
    Evidence(OK, grades=LATE, canary_beyond_s=0.2),
    Evidence(OK, grades=UNKNOWN),
    Evidence(OK, others_cpu_fraction=0.8, server_here=True),
    Evidence(OK, waited_fraction=0.3),
    Evidence(OK, throttled_fraction=0.02),
    Evidence({"planned": 200, "ok": 150, "reset": 50}),
    Evidence({"planned": 200, "ok": 3, "http_503": 197}, cause="503: too many requests"),
    Evidence({"planned": 200, "ok": 0, "connect": 200}),
    Evidence({"planned": 200, "ok": 20, "reset": 180}, death="The server was killed by signal 9"),
    Evidence({"planned": 0, "ok": 0}),
)
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
    "run --prompt-tokens 0",
    "run --trace no-such.jsonl",
    "compare no-such-run",
    "report no-such-run",
    "bound --model llama-2-7b --device abacus",
    "bound --model abacus --device a100-sxm4-80g",
)


def reasons() -> Iterator[Reason]:
    for evidence in EVIDENCE:
        yield from judge(evidence).reasons
    some = {"planned": 200, "ok": 199, "reset": 1}
    slow_start = ColdStart(10, 1.1, 0.4, 0.05, {"p50": (0.4, 0.4), "p99": (0.41, 1.5)})
    for reason in (
        warnings._interrupted("interrupted", {"planned": 200, "ok": 20}),
        warnings._few({"planned": 5, "ok": 5}),
        warnings._failures(some),
        warnings._prompt_lengths(7),
        warnings._guessed_chunks(7),
        warnings._recounted(7),
        warnings._cached(0.12, None),
        warnings._cached(None, 0.5),
        warnings._cached(0.7, 0.5),
        warnings._cached(0.3, 0.5),
        slow_start.counted(MetricFigures.absent(Absent("")))[1],
        slow_start.left_out(),
        warnings._busy_machine(0.8),
    ):
        if reason is not None:
            yield reason


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
    rate = replace(burst, arrivals=ArrivalFacts("poisson", 20.0))
    users = replace(burst, concurrency=8)
    for manifest, summary in (
        (rate, loaded(5, level=True)),
        (rate, loaded(80, reasons="overloaded")),
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
        (burst, loaded(1000)),
        (burst, replace(loaded(9), verdict=Verdict(State.CLIENT_BOUND))),
    ):
        yield limit_of(summary, manifest)


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
    unequal = finished_run(folder, "lightllm", 120, output_tok=9)
    targets = ("ttft.p90<=150ms", "tpot.p50<=12ms")
    loads = [finished_run(folder, "vllm", 140, concurrency=k, targets=targets) for k in (1, 8, 32)]
    rates = [finished_run(folder, "vllm", n, rate=n / 8) for n in (40, 160, 900)]
    close = [
        finished_run(folder, engine, 60, speed=speed * noise, output_tok=64, seed=k)
        for k, noise in enumerate((0.99, 1.01, 1.03))
        for engine, speed in (("vllm", 1.0), ("lightllm", 0.93))
    ]
    compared = [comparison_of(runs, folder) for runs in (pair, pair[:2], [pair[0], unequal], close)]
    cases = [replace(each.cases[0], name=name) for each, name in zip(compared, "abcd", strict=True)]
    sweeps = [comparison_of(runs, folder) for runs in (loads, rates, rates[:2])]
    suites = [Comparison("", tuple(cases[k] for k in kept)) for kept in ((0, 0), (0, 1), (1, 3))]
    for comparison in (*compared, *sweeps, *suites):
        said = answer(comparison)
        yield from (said.sentence, *said.details)
    for sweep, _ in (swept for comparison in sweeps for swept in sweeps_in(comparison.cases)):
        yield from (*findings_of(sweep), *remarks(sweep))
    for comparison in (compared[0], compared[3], sweeps[1]):
        shown = banner(comparison)
        yield f"{shown.state}: {shown.sentence}"
        yield from (reason.text for reason in shown.reasons)
        yield from (line for case in comparison.cases for line in findings(case))


def table() -> str:
    lines = ["# Verdicts", *(f"{state}: {text}" for state, (_, _, text) in STATES.items())]
    lines += [f"{code}: {text}" for code, text in MEANT_BY.items()]
    lines += ["", "# What limited the run", *limits()]
    lines += ["", "# Reasons and warnings: what happened | what to do"]
    lines += [f"{reason.code}: {reason.text} | {reason.advice}" for reason in reasons()]
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
    assert SENTENCES.keys() - codes == set()


if __name__ == "__main__":
    TABLE.write_text(table(), "utf-8")
