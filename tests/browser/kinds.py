"""Every kind of page there is: of one run, and of several held against each other."""

from pathlib import Path

from burstline.bench.finish import write_report
from burstline.machine.hardware import Hints, note_hardware
from burstline.verbs.compare import comparison_of
from loadgen.record.rundir import RunDir, open_run
from reports.compare import page as comparison_page
from reports.page import page
from tests.reports import synthetic
from tests.reports.synthetic_sweep import finished_run

SPEEDS = {"vllm": 1.0, "tgi": 1.35, "lightllm": 0.93}
TARGETS = ("ttft.p90<=150ms", "tpot.p50<=12ms")


def run_pages(folder: Path) -> dict[str, str]:
    """The pages of single runs by name: good, bad, empty, small, unwatched, held against its hardware."""
    rows = {
        "burst": synthetic.records(n=1000),
        "lossy": synthetic.records(n=1000, n_failed=300),
        "hopeless": synthetic.records(n=20, n_failed=20),
        "single": synthetic.records(n=1),
        "unwatched": synthetic.records(n=80),
    }
    runs = {
        name: synthetic.finished_run(folder, records, watched=name not in ("single", "unwatched"))
        for name, records in rows.items()
    }
    metal = synthetic.finished_run(folder, synthetic.records(n=200, output_tok=16))
    note_hardware(RunDir(metal.path), Hints("h100-sxm5-80g", "llama-2-7b"), lambda _: None)
    write_report(RunDir(metal.path))
    steady = finished_run(
        folder, "vllm", 400, rate=20, targets=("ttft.p50<=1s", "ttft.p99<=1ms", "ttft<=15ms")
    )
    runs |= {"metal": open_run(metal.path), "steady": steady}
    return {name: page.render(run) for name, run in runs.items()}


def comparison_pages(folder: Path) -> dict[str, str]:
    """Three engines with repeats, two runs, a sweep of three, one of rates, and what may not be compared."""
    repeats = [
        finished_run(folder, engine, 120, speed=speed * noise, seed=k)
        for k, noise in enumerate((0.98, 1.0, 1.02))
        for engine, speed in SPEEDS.items()
    ]
    loads = [
        finished_run(folder, engine, 140, speed=speed, concurrency=k, targets=TARGETS, n_failed=lost)
        for engine, speed in SPEEDS.items()
        for k in (1, 2, 4, 8, 16, 32)
        for lost in [20 if (engine, k) == ("tgi", 32) else 0]
    ]
    rates = [finished_run(folder, "vllm", n, rate=n / 8) for n in (40, 100, 160, 400, 900)]
    stopping = finished_run(folder, "lightllm", 120, output_tok=9)
    kinds = {
        "three": repeats,
        "two": repeats[:2],
        "sweep": loads,
        "rates": rates,
        "unequal": [repeats[0], stopping],
    }
    return {name: comparison_page.render(comparison_of(runs, folder)) for name, runs in kinds.items()}
