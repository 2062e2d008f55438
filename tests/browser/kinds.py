"""Every kind of page there is, of runs that never happened: single runs, comparisons, sweeps and suites."""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from burstline.bench.conclusion import write_report
from burstline.cli import main
from burstline.loadgen.capture.files import write_json
from burstline.machine.hardware import note_hardware
from burstline.machine.hints import Hints
from burstline.measure.record.record import Outcome, Record
from burstline.measure.record.rundir import Run, open_run
from burstline.measure.stats.figure import Result
from burstline.measure.stats.limit_search import Found, LatencyBound, LateShare, LoadProbe, ProbeLook, Purpose
from burstline.measure.summarize import summarize_run
from burstline.reports.model.comparison import Member, alone, view_of
from burstline.reports.model.contenders import comparison_of
from burstline.reports.model.gated import (
    BASELINE,
    CANDIDATE,
    NUMBERS,
    Rule,
    compared,
    judge_pairs,
    judge_series,
)
from burstline.reports.page.certificate_page import certificate_page
from burstline.reports.page.gate_blocks import gate_blocks, gate_page
from burstline.reports.page.limit_page import LimitResult, limit_page
from burstline.reports.page.page import render
from burstline.suites.execution import comparison_of_suite
from tests.measure.test_certify import burst, certified, told
from tests.reports import synthetic
from tests.reports.synthetic_sweep import finished_run

SPEEDS = {"vllm": 1.0, "tgi": 1.35, "lightllm": 0.93}
TARGETS = ("ttft.p90<=150ms", "tpot.p50<=12ms")
PLATFORMS = {
    "h100": ("NVIDIA H100 80GB HBM3", 1.0, 1.0),
    "l40s": ("NVIDIA L40S", 2.6, 0.8),
    "cpu": ("", 9.0, 0.5),
}
"""The GPU, how much slower it is, and how much of the engines' difference it leaves, as a power."""
MS = 1_000_000
LOG = (
    "INFO 11-22 10:55:12 [core.py:58] Initializing a V1 LLM engine (v0.11.2)",
    "INFO 11-22 10:55:40 [kv_cache_utils.py:864] GPU KV cache size: 120,000 tokens",
    "(EngineCore_DP0 pid=412) ERROR 11-22 10:56:44 [core.py:710] torch.OutOfMemoryError: CUDA out of memory",
    "INFO:     Application shutdown complete.",
)


def _burst(folder: Path) -> Run:
    return _held_to_its_hardware(synthetic.finished_run(folder, synthetic.records(n=1000)))


def _slow_tail(folder: Path) -> Run:
    """Each fiftieth request waits 20 s in the middle of its reply."""

    def stalled(row: Record) -> Record:
        token_ns = [at + (20_000 * MS if k >= 12 else 0) for k, at in enumerate(row.token_ns)]
        return replace(row, token_ns=token_ns, closed_ns=token_ns[-1] + MS)

    rows = synthetic.records(n=1000, prompt_tok=128)
    return synthetic.finished_run(folder, [stalled(r) if r.index % 50 == 7 else r for r in rows])


def _hopeless(folder: Path) -> Run:
    """The engine runs out of memory: every connection is reset."""
    rows = synthetic.records(n=20, n_failed=20)
    reset = next(row for row in rows if row.outcome == Outcome.RESET)
    run = synthetic.finished_run(
        folder, [replace(row, outcome=reset.outcome, error=reset.error) for row in rows]
    )
    (run.path / "server.log").write_text("\n".join(LOG))
    return open_run(run.path)


def _interrupted(folder: Path) -> Run:
    """Ctrl-C after half of the replies: what was in flight is cancelled."""
    rows = synthetic.records(n=300)
    end_ns = sorted(r.closed_ns or 0 for r in rows)[150]
    run = open_run(synthetic.finished_run(folder, [_cut(r, end_ns) for r in rows]).path)
    run.save_manifest(replace(run.manifest, status="interrupted"))
    write_json(run.path / "summary.json", summarize_run(open_run(run.path)).to_json())
    return open_run(run.path)


def _cut(row: Record, end_ns: int) -> Record:
    if (row.closed_ns or 0) <= end_ns:
        return row
    token_ns = [at for at in row.token_ns if at <= end_ns]
    return replace(
        row,
        outcome=Outcome.CANCELLED,
        closed_ns=end_ns,
        token_ns=token_ns,
        **{name: getattr(row, name)[: len(token_ns)] for name in ("token_n", "read_lag_ns", "read_error_ns")},
        answer_ns=token_ns[0] if token_ns else None,
        headers_ns=row.headers_ns if token_ns else None,
        output_tok=len(token_ns),
        finish_reason=None,
        error="interrupted by Ctrl-C",
    )


def _many(folder: Path) -> Run:
    rows = synthetic.records(n=100_000, prompt_tok=64, output_tok=8)
    return synthetic.finished_run(folder, rows)


def _fails(*_: object, **__: object) -> None:
    raise RuntimeError("Failed to process <string> with tex because latex could not be found")


def _held_to_its_hardware(run: Run) -> Run:
    note_hardware(run, Hints("h100-sxm5-80g", "llama-2-7b"))
    run.save_manifest()
    write_report(run)
    return run


RUNS: dict[str, Callable[[Path], Run]] = {
    "burst": _burst,
    "tail": _slow_tail,
    "lossy": lambda folder: synthetic.finished_run(folder, synthetic.records(n=1000, n_failed=300)),
    "hopeless": _hopeless,
    "interrupted": _interrupted,
    "slo": lambda folder: finished_run(
        folder, "vllm", 400, rate=20, targets=("ttft.p50<=1s", "ttft.p99<=1ms", "ttft<=15ms")
    ),
    "many": _many,
    "eight": lambda folder: synthetic.finished_run(folder, synthetic.records(n=8)),
    "unwatched": lambda folder: synthetic.finished_run(folder, synthetic.records(n=80), watched=False),
    "undrawn": lambda folder: synthetic.finished_run(folder, synthetic.records(n=200)),
    "single": lambda folder: synthetic.finished_run(folder, synthetic.records(n=1), watched=False),
}


def _repeats(folder: Path) -> list[Run]:
    return [
        finished_run(folder, engine, 120, speed=speed * noise, seed=k)
        for k, noise in enumerate((0.98, 1.0, 1.02))
        for engine, speed in SPEEDS.items()
    ]


def _loads(folder: Path) -> list[Run]:
    return [
        finished_run(folder, engine, 140, speed=SPEEDS[engine], concurrency=k, targets=TARGETS, n_failed=lost)
        for engine in ("vllm", "tgi")
        for k in (1, 2, 4, 8, 16, 32)
        for lost in [20 if (engine, k) == ("tgi", 32) else 0]
    ]


def _unequal(folder: Path) -> list[Run]:
    return [finished_run(folder, "vllm", 120), finished_run(folder, "lightllm", 120, served_tok=9)]


COMPARISONS: dict[str, Callable[[Path], list[Run]]] = {
    "three": _repeats,
    "two": lambda folder: _repeats(folder)[:2],
    "sweep": _loads,
    "rates": lambda folder: [finished_run(folder, "vllm", n, rate=n / 8) for n in (40, 100, 160, 400, 900)],
    "unequal": _unequal,
}


def _suite(folder: Path) -> None:
    """Three engines at two workloads, three times each."""
    slots = [
        (engine, cell, repeat, {"n": n, "output_tok": output_tok, "speed": speed * (0.97 + 0.02 * repeat)})
        for cell, n, output_tok in (("llama-2-7b, chat", 120, 24), ("llama-2-7b, long replies", 60, 64))
        for repeat in (1, 2, 3)
        for engine, speed in SPEEDS.items()
    ]
    _write_suite(folder, "three-engines", "Three engines at two workloads", slots)


def _platforms(folder: Path) -> None:
    """Two engines on three platforms, twice each."""
    slots = [
        (engine, f"llama-2-7b, chat, {name}", repeat,
         {"n": 80, "gpu": gpu, "speed": slower * SPEEDS[engine] ** share * (0.97 + 0.02 * repeat)})
        for name, (gpu, slower, share) in PLATFORMS.items()
        for repeat in (1, 2)
        for engine in ("vllm", "tgi")
    ]  # fmt: skip
    _write_suite(folder, "three-platforms", "Two engines on H100, L40S and a CPU", slots)


def _write_suite(folder: Path, name: str, description: str, slots: list) -> None:
    rows = []
    for k, (engine, cell, repeat, options) in enumerate(slots):
        finished_run(folder / f"{k:03d}", engine, seed=repeat, **options)
        rows.append({"id": f"{k:03d}", "engine": engine, "cell": cell, "repeat": repeat})
    told = {"name": name, "description": description, "slots": rows}
    (folder / "suite.json").write_text(json.dumps(told))


SUITES: dict[str, Callable[[Path], None]] = {"suite": _suite, "platforms": _platforms}


def _gate(slower: float, n_pairs: int) -> Callable[[Path], str]:
    def page(folder: Path) -> str:
        members = []
        for k in range(n_pairs):
            for label, speed in ((BASELINE, 1.0), (CANDIDATE, slower)):
                run = finished_run(folder, "vllm", 80, speed=speed * (0.99 + 0.01 * (k % 3)), seed=k)
                members.append(Member(label, run, "", k))
        rule = Rule((NUMBERS["e2e.p50"], NUMBERS["ttft.p50"]), 0.05, 20)
        judged = judge_pairs(members, rule)
        blocks = gate_blocks(judged, "burstline gate 'run a' 'run b'")
        return gate_page(judged, blocks, compared(members, rule))

    return page


def _series(folder: Path) -> str:
    runs = [
        finished_run(folder, "vllm", 60, speed=1.2 if k > 8 else 1 + k % 3 / 99, seed=k) for k in range(12)
    ]
    judged = judge_series(runs, Rule((NUMBERS["e2e.p50"],), 0.05, 20))
    return gate_page(judged, gate_blocks(judged, "burstline gate"), None)


def _limit(folder: Path) -> str:
    """The load that holds is found between 20 and 24 requests a second."""
    loads = (2, 8, 32, 20, 24)
    slo = "ttft.p90<=25ms"
    runs = [
        finished_run(folder, "vllm", 200, rate=load, speed=1.0 if load <= 20 else 1.5, targets=(slo,))
        for load in loads
    ]
    looks = [
        ProbeLook(
            Result.PASS if load <= 20 else Result.FAIL, 200, (LateShare(0.01 if load <= 20 else 0.4, 200.0),)
        )
        for load in loads
    ]
    probes = [
        LoadProbe(k, float(load), Purpose.SCOUT, look)
        for k, (load, look) in enumerate(zip(loads, looks, strict=True), 1)
    ]
    found = Found(20.0, 24.0, 0.05, tuple(probes), (LatencyBound(slo, 0.9, 0.025),), best=21.0)
    names = tuple(run.name for run in runs)
    return limit_page(LimitResult("vllm", "rate", (slo,), 600.0, found, None, names), runs)


def _certificate(**off_ms: float) -> Callable[[Path], str]:
    return lambda _: certificate_page(certified(burst(), told(**off_ms)))


def _predicted(*argv: str) -> Callable[[Path], str]:
    def page(folder: Path) -> str:
        assert main([*argv, "--json", "--out", str(folder / "out")]) == 0
        return (folder / "out" / "report.html").read_text()

    return page


DECISIONS: dict[str, Callable[[Path], str]] = {
    "gate": _gate(1.2, 4),
    "undecided": _gate(1.02, 1),
    "series": _series,
    "limit": _limit,
    "certificate": _certificate(ttft=118.0, e2e=2.5),
    "exact": _certificate(),
    "bound": _predicted("bound", "--model", "llama-3.1-8b", "--device", "h100", "--batch", "32"),
    "devices": _predicted("bound", "--model", "llama-2-13b", "--device", "a100", "h100", "rtx4090"),
    "study": _predicted("study", "training", "--model", "llama-2-7b", "--tp", "2", "--pp", "2"),
}
"""Pages of gates, of a search, of certificates and of predictions, as HTML."""


class Pages(Mapping[str, Path]):
    """The page of each kind, made under `folder` when it is first asked for."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __getitem__(self, name: str) -> Path:
        path = self.folder / f"{name}.html"
        if not path.exists():
            path.write_text(_html(name, self.folder / name))
        return path

    def __iter__(self) -> Iterator[str]:
        return iter((*RUNS, *COMPARISONS, *SUITES, *DECISIONS))

    def __len__(self) -> int:
        return len(tuple(self))


def _html(name: str, folder: Path) -> str:
    folder.mkdir()
    if name in RUNS:
        view = view_of(RUNS[name](folder))
        with pytest.MonkeyPatch.context() as patch:
            if name == "undrawn":
                patch.setattr("matplotlib.figure.Figure.savefig", _fails)
            return render(alone(view))
    if name in COMPARISONS:
        return render(comparison_of(COMPARISONS[name](folder), folder))
    if name in DECISIONS:
        return DECISIONS[name](folder)
    SUITES[name](folder)
    comparison = comparison_of_suite(folder)
    assert comparison is not None
    return render(comparison)
