"""Every sentence of cause, limit and advice on a run's page holds of its run (`predicates.py`)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Final

import numpy as np
import pytest

from burstline.loadgen.capture.drive_report import DriveReport, LostDriver, MachineUse, NetworkReport
from burstline.measure.record.manifest import HostFacts, LoadFacts, Manifest, ServerFacts, StageFacts
from burstline.measure.record.rundir import open_run
from burstline.measure.record.summary import (
    Agreement,
    Audit,
    Concurrency,
    Conservation,
    CountedWindow,
    Instrument,
    LengthFigures,
    LengthSummary,
    Memory,
    MetricFigures,
    PrefixCache,
    SecondReader,
    Stationarity,
    Summary,
    Throughput,
)
from burstline.measure.record.verdict import Grade, PercentileGrade, Reason, SloResult, State, Verdict
from burstline.measure.stats.figure import Absent, Estimate, Figure, Result
from burstline.measure.verdict.judge import caveats, judge
from burstline.reports import sentences
from burstline.reports.blocks import Banner
from burstline.reports.model.comparison import View, view_of
from burstline.roofline.reconcile.reconciliation import NotReconciled
from burstline.servers.identity import Identity
from burstline.workloads.arrivals import parse_arrival
from burstline.workloads.spec import HangUps, LoadSpec
from tests.reports.predicates import PREDICATES
from tests.reports.said import (
    IN_ANSWERS,
    LINES,
    OF_SEVERAL,
    REASONS,
    STEPS,
    false_in,
    judged,
    said_by,
    said_in,
    told,
    whole,
)
from tests.seeds import SEED

N: Final = 500
GOLDEN: Final = Path(__file__).parents[1] / "golden/runs/4"
ABSENT: Final = ("unwatched", "too-short", "canary-lost", "not-available")
FAILURES: Final = (
    "timeout", "reset", "http_503", "http_429", "http_400", "http_500", "refused", "truncated", "short",
    "connect",
)  # fmt: skip


class Draw:
    """A run that never happened: its sections at random, within what one run can have at once."""

    def __init__(self, k: int) -> None:
        self.rng = np.random.default_rng([SEED, k])
        self.clean = self.often(0.5)
        self.kind = self.one("closed loop", "burst", "open loop")
        self.planned = int(self.one(1, 8, 40, 200, 2000))
        self.counts = self._counts()
        self.users = int(self.one(1, 2, 8, 64)) if self.kind == "closed loop" else None
        self.rate = float(self.one(0.5, 5, 40)) if self.kind == "open loop" else None
        self.most = min(self.users or self.planned, self.planned)
        self.steady = self._steady()

    def one(self, *of: object) -> object:
        return of[int(self.rng.integers(len(of)))]

    def often(self, p: float) -> bool:
        return bool(self.rng.random() < p)

    def figure(self, low: float, high: float, *, known: float = 0.7, unit: str = "s", n: int = 100) -> Figure:
        """A value between these, or none for one of the usual reasons."""
        if not self.often(known):
            return Absent("it was not recorded", str(self.one(*ABSENT)))
        return Estimate(float(self.rng.uniform(low, high)), None, None, None, n, unit)

    def _steady(self) -> str:
        """What a test of a steady state found; a queue grows only where requests come whatever is served."""
        if self.kind == "burst":
            return "none"
        grew = ("grew",) * (self.kind == "open loop")
        return str(
            self.one("level", "none") if self.clean else self.one("level", "none", "ttft", "tpot", *grew)
        )

    def _counts(self) -> dict[str, int]:
        lost: dict[str, int] = {}
        if not self.clean and self.often(0.6):
            share = float(self.one(0.005, 0.05, 0.3, 1.0))
            for kind in self.rng.choice(FAILURES, 2, replace=False):
                lost[str(kind)] = int(share * self.planned / 2) + self.often(0.3)
        if self.often(0.1):
            lost["abandoned"] = self.planned // 5
        self.status = "complete"
        self.error = self.error_code = None
        if not self.clean and self.often(0.1):
            self.status, self.error = "failed", "The server was killed by signal 9"
            self.error_code = self.one(None, "client-failed")
            if self.often(0.5):
                return {"planned": self.planned, "ok": 0, "not_sent": self.planned}
        if self.often(0.1):
            lost["cancelled"], self.status = self.planned // 3, "interrupted"
        kept: dict[str, int] = {}
        for kind, n in lost.items():
            kept[kind] = min(n, self.planned - sum(kept.values()))
        return {"planned": self.planned, "ok": self.planned - sum(kept.values()), **kept}

    def manifest(self) -> Manifest:
        here = self.often(0.5)
        asked = LoadSpec(
            requests=self.planned,
            concurrency=self.users,
            rate=self.rate,
            arrival=parse_arrival("poisson") if self.rate else None,
            think_s="1" if self.users and self.often(0.3) else None,
            cancel_share=HangUps(0.3) if "abandoned" in self.counts else None,
        )
        identity = Identity(
            "vllm",
            max_num_seqs=self.one(None, 4, 32, 256),
            max_num_batched_tokens=self.one(None, 2048),
            kv_tok=self.one(None, 20_000),
            prefix_cache=self.one(None, False, True),
        )
        stages = tuple(StageFacts(f"warm-up {k}", 8, 8, float(self.rng.uniform(0.1, 1))) for k in (1, 2))
        return Manifest(
            engine=str(self.one("vllm", "a server of one's own")),
            error=self.error,
            error_code=self.error_code,
            workload="drawn",
            status=self.status,
            asked=asked,
            identity=identity if self.often(0.8) else None,
            max_failures=float(self.one(0.01, 0.1)),
            host=HostFacts(cores=2, cores_allowed=self.one(1, 2)),
            server=ServerFacts(
                attached=not here, url=None if here else self.one("http://127.0.0.1", "http://h.org")
            ),
            load=LoadFacts(stages=stages if self.often(0.3) else ()),
            lost=(LostDriver(1, 2.0, "it was killed", 0.5),) if self.often(0.05) else (),
            drivers=self._drivers(),
        )

    def _drivers(self) -> tuple[DriveReport, ...]:
        if self.clean or not self.often(0.2):
            return ()
        reports = []
        for k in range(2):
            machine = MachineUse(4, 0.5, float(self.one(0.0, 0.5)), 0.0, 10**9)
            network = NetworkReport(2, 10**6, 2 * 10**6, int(self.one(0, 100)))
            reports.append(
                DriveReport(
                    k, 0, self.planned, self.planned, 0, {}, None, None, None, 0, 0, 0, 1, 1, 1.0, 1.0, 1, 0,
                    network=network, host=f"h{k}", machine=machine,
                )
            )  # fmt: skip
        return tuple(reports)

    def concurrency(self, manifest: Manifest) -> Concurrency:
        slots = manifest.identity.max_num_seqs if manifest.identity else None
        mean = float(self.rng.uniform(0.4, 1)) * self.most
        running = min(mean * float(self.rng.uniform(0.3, 1.1)), slots or self.most, self.most)
        waiting = max(mean - running, 0.0) * float(self.one(0, 1))
        at = {"server_running_max": float(np.ceil(running)), "server_waiting_mean": waiting}
        why = Absent("the engine has no metrics", str(self.one(*ABSENT)))
        watched = self.often(0.7)
        streaming = plain(max(1.0, self.most // 3), "1", 1)
        return Concurrency(
            mean=plain(mean, "1", 1),
            max=plain(float(self.most), "1", 1),
            **{name: plain(value, "1", 9) if watched else why for name, value in at.items()},
            open_after_fraction=self.figure(0, 0.2),
            server_full_fraction=self.figure(0, 1) if watched and waiting else None,
            streaming_max=streaming if not watched and self.often(0.3) and self.most > 3 else None,
        )

    def stationarity(self) -> tuple[Stationarity, list[Reason]]:
        """What became of the tests of a steady state, and the reason that follows from them."""
        if self.steady == "none":
            return Stationarity(), []
        chance = {name: float(self.rng.uniform(0.1, 1)) for name in ("in_flight", "ttft", "tpot")}
        change = {name: float(self.rng.uniform(-0.05, 0.05)) for name in chance}
        name = {"grew": "in_flight"}.get(str(self.steady), str(self.steady))
        if name in chance:
            chance[name], change[name] = (
                1e-4,
                float(self.one(0.6, 2.0) if name == "in_flight" else self.one(-0.3, 0.6)),
            )
        found = {
            "level": [],
            "grew": [Reason.of("overloaded", share=change["in_flight"])],
            **{
                own: [
                    Reason.of(
                        "drifting" if change[own] > 0 else "drifting.fell",
                        metric=own.upper(),
                        change=abs(change[own]),
                        at_s=None,
                    )
                ]
                for own in ("ttft", "tpot")
            },
        }
        figures: dict[str, Figure] = {}
        for own in chance:
            figures[f"{own}_trend_p"] = plain(chance[own], "1", 20)
            figures[f"{own}_change_fraction"] = plain(change[own], "1", 20)
        return Stationarity(**figures), found[str(self.steady)]

    def metrics(self) -> tuple[dict[str, MetricFigures], dict[str, dict[str, PercentileGrade]]]:
        """Latencies, and how far the client moved each."""
        least = float(self.rng.uniform(0.01, 0.3))
        times = np.cumprod([1, 2, *self.rng.uniform(1, 4, 3)]) * least
        metrics, grades = {}, {}
        for name in ("ttft", "tpot", "e2e"):
            row = dict(zip(("min", "p50", "p90", "p95", "p99"), times, strict=True))
            figures = {
                p: Estimate(float(v), float(v) * 0.9, float(v) * 1.1, 0.95, 200, "s") for p, v in row.items()
            }
            error = self.figure(0, 2 * float(times[1]), known=0.0 if self.clean else 0.1)
            metrics[name] = MetricFigures(**figures, instrument_error=error)
            grades[name] = {
                p: PercentileGrade(
                    Grade("ok" if self.clean else str(self.one(*["ok"] * 12, "unreliable"))),
                    0.0 if name == "tpot" else float(self.one(0, 0, 0.2)),
                    self.one(0.0, 0.1, None),
                    held=self.one(None, True) if name == "tpot" else None,
                )
                for p in ("p50", "p99")
            }
        return metrics, grades

    def instrument(self) -> Instrument:
        def share(p: float, high: float) -> Figure:
            return self.figure(0, high if not self.clean and self.often(2 * p) else 0.01, unit="1")

        return Instrument(
            server_cpu_s=self.figure(1, 9),
            others_cpu_fraction=share(0.3, 0.9),
            steal_fraction=share(0.1, 0.3),
            throttled_fraction=share(0.1, 0.1),
            client_cpu_wait_fraction=share(0.2, 0.4),
            gpu_slowed_fraction=share(0.1, 0.5),
            gpu_power_capped_fraction=share(0.1, 0.5),
            canary_p99_s=self.figure(0, 1e-3),
            canary_beyond_p99_s=self.figure(0, 0.2),
            unread_fraction=share(0.1, 0.3),
            network_retransmits=self.figure(0, 400 if self.often(0.2) else 0.1, unit="1"),
        )

    def prefix_cache(self) -> PrefixCache | None:
        if self.often(0.4):
            return None
        infinite = float(self.one(0, 300, 600))
        return PrefixCache(
            prompt_tok=plain(1000.0, "tok", 1),
            infinite_tok=plain(infinite, "tok", 1),
            simulated_tok=self.figure(0, infinite, unit="tok"),
            counted_tok=self.figure(0, 700, unit="tok"),
            replied_tok=self.figure(0, float(self.one(1, 300, 700)), unit="tok"),
            restarted_s=self.figure(1, 5, known=0.1, n=int(self.one(1, 9))),
        )

    def targets(self, metrics: Mapping[str, MetricFigures]) -> tuple[SloResult, ...]:
        results = []
        for text in ("ttft.p50<=1ms", "e2e.p99<=400ms", "output_tok_per_s>=2000"):
            if self.often(0.3):
                result = Result(str(self.one("pass", "fail", "inconclusive")))
                results.append(SloResult(text, result, "", metrics["ttft"].p50))
        return tuple(results)

    def summary(self, manifest: Manifest) -> Summary:
        metrics, grades = self.metrics()
        steady, reasons = self.stationarity()
        served = (self.rate or 10.0) * (self.counts["ok"] / max(self.planned, 1))
        served *= float(
            self.rng.uniform(0.3, 0.7) if self.steady in ("grew", "none") else self.rng.uniform(0.95, 1.05)
        )
        kv = self.figure(0.001, 1.0, unit="1")
        put_back = self.figure(0, 20, unit="1") if _at(kv) > 0.9 else plain(0.0, "1", 1)
        n_out = Estimate(float(self.one(10, 64)), None, None, None, self.planned, "tok")
        counted = plain(1000 * (float(self.one(1.5, 0.5)) if self.often(0.1) else 1), "tok")
        other = SecondReader("httpx", 9, ("a",) if self.often(0.5) else ())
        lengths = LengthSummary(
            output_tok=LengthFigures(served_mean=n_out),
            **{
                name: self.figure(0, 9, known=0.3)
                for name in ("prompt_mismatches", "output_mismatches", "hidden_tok", "cut_behind")
            },
            splits={str(self.one("spread", "no-text", "counted")): 3},
            output_sources={str(self.one("tokenizer", "usage")): 9},
        )
        summary = Summary(
            counts=self.counts,
            metrics=metrics,
            verdict=Verdict(State.VALID),
            concurrency=self.concurrency(manifest),
            stationarity=steady,
            memory=Memory(
                kv_peak_fraction=kv, preemptions=put_back, running_after=self.one(None, self.figure(0, 3)),
                kv_after_fraction=self.one(None, self.figure(0, 0.05)),
            ),
            throughput=Throughput(
                requests_per_s=plain(served, "req/s", self.planned),
                input_tok_per_s=plain(served * 512, "tok/s", self.planned),
                output_tok_per_s=plain(served * n_out.point * float(self.one(1, 1.1)), "tok/s"),
                read_error_fraction=self.figure(0, 0.2 if self.often(0.1) else 0.01),
            ),
            window=CountedWindow(start_s=self.figure(0, 1), end_s=self.figure(2, 60)),
            instrument=self.instrument(),
            grades=grades,
            prefix_cache=self.prefix_cache(),
            conservation=Conservation(
                output_client_tok=plain(1000.0, "tok", 1),
                output_server_tok=counted,
                output_residual=plain(1 - 1000 / counted.point),
            ),
            agreement=Agreement(ttft_gap_s=self.figure(-0.5, 0.5), ttft_client_p50_s=self.figure(0.1, 1)),
            lengths=lengths,
            roofline=NotReconciled("the device is unknown") if self.often(0.3) else None,
            audit=Audit(second_reader=other) if self.often(0.1) else None,
        )  # fmt: skip
        return self.judged(summary, manifest, reasons)

    def judged(self, summary: Summary, manifest: Manifest, steady: list[Reason]) -> Summary:
        doubts = ()
        if summary.audit and summary.audit.second_reader and summary.audit.second_reader.differ:
            doubts = (Reason.of("misread", what="Another client read 1 of 9 replies differently."),)
        broken = (
            (Reason.of("contradiction", what="TTFT p50 is above E2E p50."),)
            if self.often(0.03) and not self.clean
            else ()
        )
        verdict = judge(
            summary,
            manifest,
            self.status,
            others={State.FAILED: broken, State.NOT_STATIONARY: steady, State.NOT_COMPARABLE: doubts},
            warnings=tuple(caveats(summary, manifest, self.status)),
        )
        return replace(summary, verdict=verdict, targets=self.targets(summary.metrics))


def plain(value: float, unit: str = "1", n: int = 1) -> Estimate:
    """A reading without an interval."""
    return Estimate(float(value), None, None, None, n, unit)


def _at(figure: Figure) -> float:
    return figure.point if isinstance(figure, Estimate) else 0.0


def drawn(k: int) -> View:
    """The run of a draw, with the words of a stored run's records."""
    draw, run = Draw(k), open_run(GOLDEN)
    run.manifest = draw.manifest()
    return View(run, draw.summary(run.manifest))


@pytest.fixture(scope="module")
def draws() -> list[tuple[View, list[str], list[str]]]:
    """500 runs, the sentences that are false of each, and those that contradict each other."""
    views = [drawn(k) for k in range(N)]
    return [(view, *judged(view, records=False)) for view in views]


def test_every_sentence_holds_of_each_drawn_run(draws):
    assert not {k: false for k, (_, false, _) in enumerate(draws) if false}


def test_no_two_sentences_on_a_drawn_run_contradict_each_other(draws):
    assert not {k: contrary for k, (*_, contrary) in enumerate(draws) if contrary}


def test_each_predicate_is_false_of_some_run(draws, burst, lossy):
    """What is true of all runs says nothing."""
    runs = [
        *map(told, map(view_of, (burst, lossy, open_run(GOLDEN)))),
        *(told(view, records=False) for view, *_ in draws),
    ]
    assert not [code for code, holds in PREDICATES.items() if all(map(holds, runs))]


def test_each_sentence_has_a_predicate():
    codes = {*(REASONS.keys() - OF_SEVERAL), *IN_ANSWERS, *LINES}
    codes |= {f"states.{code}" for code in sentences.STATES} | {
        f"meant_by.{code}" for code in sentences.MEANT_BY
    }
    codes |= {f"NEXT.{code}" for code in STEPS}
    assert PREDICATES.keys() == codes


def filled(template: str) -> str:
    return re.sub(r"\{[^}]*\}", "7", template)


def test_each_sentence_is_known_by_its_words():
    own = {code: filled(text) for code, text in IN_ANSWERS.items()}
    own |= {f"NEXT.{code}": f"Next: {text}" for code, text in STEPS.items()}
    own |= {code: f"Next: {text}" for code, text in own.items() if code.startswith("next.")}
    assert not [code for code, text in own.items() if code not in dict(said_in(text))]
    for name in REASONS.keys() - OF_SEVERAL:
        text, advice = (filled(whole(REASONS[name][part])) for part in ("text", "advice"))
        banner = Banner("", "", "", "", (Reason(name.partition(".")[0], text, advice),))
        assert name in dict(said_by(banner)), name
    for table, texts in (
        ("states", {k: v[2] for k, v in sentences.STATES.items()}),
        ("meant_by", sentences.MEANT_BY),
    ):
        for code, text in texts.items():
            banner = Banner("", "", "", f"{text} No SLOs.", (Reason(code.removeprefix("warned."), "", ""),))
            assert f"{table}.{code}" in dict(said_by(banner))


def test_a_run_whose_page_lies_is_found(lossy, monkeypatch):
    """What looks at the runs of all tests (`tests/conftest.py`) can fail."""
    assert false_in(lossy.path) == []
    with monkeypatch.context() as patch:
        patch.setattr(
            "burstline.reports.page.bottleneck.limited_by", lambda *_, **__: ("limit.overloaded", {})
        )
        assert false_in(lossy.path) == ["NEXT.limit.overloaded", "limit.overloaded"]
