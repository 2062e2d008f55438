"""`python -m research`: the roofline model against measured kernels and runs, before it is trusted.

Halves are fixed: constants are set on the H100 (kernels; loops of Llama) and judged on all else: other
devices, and other models on the H100. Never by point. `--fit` prints the constants that the H100's kernels
set; `--remove` what the error is without each constant, with a 90% interval from a bootstrap over points.
"""

import argparse
import os
import sys
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np

from burstline.console import exit_codes
from burstline.errors import RooflineError
from burstline.roofline.calibrate.measurements import fitted
from burstline.roofline.device.calibration import Constants, load_calibration, shared, stack_host
from burstline.roofline.predict.kernels import Amounts
from research.kernels import Table, beaten, read_tables
from research.points import Load, Trace, read_bursts, read_loops, read_static, trace
from research.published import cells, replayed
from research.tried import Change, Tried

DATA = Path(__file__).parents[1] / "tests" / "data"
SET_ON = "h100-sxm5-80g"


def main() -> int:
    """What the command line asks for; a user's mistake is one line and exit code 2."""
    parser = argparse.ArgumentParser(prog="python -m research", description=__doc__)
    parser.add_argument("--data", type=Path, default=DATA, help="folder of the measured tables")
    parser.add_argument("--fit", action="store_true", help="print the constants that the H100's kernels set")
    parser.add_argument("--remove", action="store_true", help="judge the model without each constant")
    args = parser.parse_args()
    if not (args.data / "measured").is_dir():
        print(f"research: no measured tables in {args.data}; run from a clone, or give --data FOLDER")
        return exit_codes.USAGE
    tables = read_tables(args.data / "measured")
    if args.fit:
        print(fit(tables))
        return exit_codes.DONE
    tried = Tried([trace for trace in _traces(loads(args.data / "serving")) if trace is not None])
    print("\n".join([*_serving_rows(tried), *_kernel_rows(tables), *_other_rows(args.data)]))
    if args.remove:
        print("\n".join(_removals(tried, tables)))
    return exit_codes.DONE


def loads(serving: Path) -> list[Load]:
    """Every load of the files that the repository holds."""
    return [
        *read_loops(serving / "aic_operating_points.csv"),
        *read_bursts(serving / "trtllm_v1_maximum_throughput.csv"),
        *read_static(serving / "lmdeploy_a100_fp16_static.csv"),
    ]


def _traces(found: list[Load]) -> list[Trace | None]:
    with ProcessPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        return list(pool.map(_traced, found, chunksize=2))


def _traced(load: Load) -> Trace | None:
    try:
        return trace(load)
    except RooflineError:  # a request that its cache cannot hold
        return None


def is_set_on(load: Load) -> bool:
    """Whether a load is of the half on which constants were set."""
    return load.device == SET_ON and load.model.startswith("llama")


def told(ratio: Amounts) -> str:
    """Mean, median and 90th percentile of the absolute error, and the median with its sign, in percent; then
    the factor within which 80% of the points are, up or down (`[interval.published]` of constants.toml)."""
    e = 100 * abs(ratio - 1)
    bias = 100 * (np.median(ratio) - 1)
    within = np.exp(np.quantile(np.abs(np.log(ratio)), 0.8))
    errors = f"{e.mean():6.1f} {np.median(e):6.1f} {np.quantile(e, 0.9):6.1f} {bias:+7.1f}"
    return f"{errors} {len(ratio):6,} {within:6.2f}"


_HEAD = f"{'percent':58} {'mean':>6} {'median':>6} {'p90':>6} {'bias':>7} {'n':>6} {'80%':>6}  wanted"
WANTED: Mapping[str, str] = {
    "TPOT, dense loop: judged on": "6.5 / 5 / 14",
    "TPOT, dense loop: qwen3-32b": "8",
    "TTFT, dense loop: judged on": "- / 15",
    "E2E, dense loop: judged on": "6",
    "throughput, dense burst fp8: judged on": "6",
    "throughput, dense burst fp4: judged on": "8",
    "throughput, experts burst fp8: judged on": "20",
    "throughput, experts burst fp4: judged on": "20",
    "TPOT, experts loop: judged on": "12",
    "TTFT, experts loop: judged on": "- / 25",
}
"""The mean, median and 90th percentile that the model is meant to reach, in percent, by row."""


def _serving_rows(tried: Tried) -> list[str]:
    ratio = tried.ratios()
    groups: dict[str, list[int]] = {}
    for i, (each, name) in enumerate(tried.figures):
        load, figure = each.load, name
        bits = load.deployment.quant.weights if load.kind == "burst" else ""
        kind = f"{'dense' if load.is_dense else 'experts'} {load.kind} {bits}".strip()
        half = "set on" if is_set_on(load) else "judged on"
        keys = [half, load.deployment.device.name, load.model]
        if figure == "TTFT" and load.is_dense:
            keys.append(_where(load))
        for key in keys:
            groups.setdefault(f"{figure}, {kind}: {key}", []).append(i)
    rows = (f"{key:58} {told(ratio[groups[key]])}  {WANTED.get(key, '')}".rstrip() for key in sorted(groups))
    return [_HEAD, *rows]


def _where(load: Load) -> str:
    """Of a closed loop: device, engine, thousands of prompt tokens, and about how many streams."""
    assert load.streams is not None
    streams = "1 to 16" if load.streams <= 16 else "17 to 128"
    n_prompt_tok = max(request.prompt_tok for request in load.asked)
    cached = "cached " if load.asked[-1].cached_tok else ""
    return f"{load.device}, {load.backend}, {cached}{n_prompt_tok / 1000:.0f}k, {streams}"


def _kernel_rows(tables: list[Table]) -> list[str]:
    rows = [""]
    for table in tables:
        half = "set on" if table.device.id == SET_ON else "judged on"
        known = load_calibration(table.device)
        rows.append(
            f"{table.kind}, {table.device.name}, {half:40}"[:58] + f" {told(table.ratios(known.constants))}"
        )
        if known.own:
            rows.append(f"{'  without its own constants':58} {told(table.ratios(shared().constants))}")
    return [*rows, f"ceilings beaten without a reason: {', '.join(beaten(tables)) or 'none'}"]


def _other_rows(data: Path) -> list[str]:
    found = cells()
    rows = [""]
    for device in dict.fromkeys(cell.device for cell in found):
        ratio = np.array([c.predicted_s / c.measured_s for c in found if c.device == device])
        rows.append(f"{f'Llama-2 200/200, batch 1, {device}':58} {told(ratio)}")
    for name, one in replayed(data / "serving" / "rtx4090_replay" / "requests.jsonl").items():
        rows.append(f"{f'replay of vLLM, RTX 4090, {name}':58} {100 * (one - 1):+.1f}")
    return rows


_LIMITS: Mapping[str, Mapping[str, tuple[float, float]]] = {
    "bf16 products": {"product": (0.3, 1), "memory": (0.3, 1), "launch_s": (0, 2e-5)},
    "fp8 products": {"product_8": (0.3, 1), "pad_8": (0, 3)},
    "decode attention": {"cache": (0.3, 1), "attention_s": (0, 5e-5)},
    "prefill attention": {"prompt": (0.3, 1)},
    "all-reduces": {"link": (0.2, 1)},
}


def fit(tables: list[Table]) -> str:
    """The constants that each kind of kernel of the H100 sets, the ones before it given."""
    of, rows = shared().constants, []
    for kind, limits in _LIMITS.items():
        table = next(t for t in tables if t.device.id == SET_ON and t.kind == kind)
        of = fitted(of, limits, [(partial(_cold, table), table.seconds[table.cold])])
        rows += [f"{name} = {getattr(of, name):.3g}  # {kind}" for name in limits]
    return "\n".join(rows)


def _cold(table: Table, of: Constants) -> Amounts:
    return np.asarray(table.predict(of)[table.cold])


# What stands in a constant's place where it is not there: no loss, no floor, or the constant that is nearest.
_WITHOUT: Mapping[str, Callable[[Constants], float]] = {
    "product": lambda _: 1.0, "product_8": lambda of: of.product, "pad_8": lambda _: 0.0,
    "memory": lambda _: 1.0, "launch_s": lambda _: 0.0, "cache": lambda of: of.memory,
    "prompt": lambda of: of.product, "attention_s": lambda of: of.launch_s, "mixed": lambda _: 1.0,
    "passes": lambda of: of.memory, "pass_s": lambda of: of.launch_s, "link": lambda _: 1.0,
}  # fmt: skip
_KERNELS = {
    "product": "bf16 products", "product_8": "fp8 products", "pad_8": "fp8 products",
    "cache": "decode attention", "prompt": "prefill attention", "link": "all-reduces",
}  # fmt: skip
_JUDGE_DEVICE = "h200-sxm-141g"


def _removals(tried: Tried, tables: list[Table]) -> list[str]:
    """Per constant: how much larger the judged half's mean error is without it, and between which bounds."""
    hosts = {
        "step_s": {name: replace(stack_host(name), step_s=0.0) for name in tried.stacks},
        "token_s": {name: replace(stack_host(name), token_s=0.0) for name in tried.stacks},
        "most_tok": {name: replace(stack_host(name), most_tok=1e9) for name in tried.stacks},
    }
    dense = np.array([t.load.is_dense and not is_set_on(t.load) for t, _ in tried.figures])
    named = np.array([name for _, name in tried.figures])
    eight = np.array([t.load.deployment.quant.weights == "fp8" for t, _ in tried.figures])
    judged = {
        "TPOT": dense & (named == "TPOT"),
        "TTFT": dense & (named == "TTFT"),
        "throughput": dense & (named == "throughput") & eight,
    }
    rows = ["", "Without each constant the judged half's mean error grows by (90% interval):"]
    base = tried.ratios()
    of = shared().constants
    for name in (*_WITHOUT, *hosts):
        value = {name: _WITHOUT[name](of)} if name in _WITHOUT else {}
        ratio = tried.ratios(Change(value, host=hosts.get(name, {})))
        grown = {what: _grown(base[at], ratio[at]) for what, at in judged.items()}
        if name in _KERNELS:
            table = next(t for t in tables if t.device.id == _JUDGE_DEVICE and t.kind == _KERNELS[name])
            grown[f"H200 {table.kind}"] = _grown(table.ratios(of), table.ratios(replace(of, **value)))
        shown = "; ".join(
            f"{what} {mean:+.2f} ({low:+.2f} to {high:+.2f})" for what, (low, mean, high) in grown.items()
        )
        earned = any(low > 0 for low, *_ in grown.values())
        rows.append(f"{name:12} {'kept' if earned else 'NOT EARNED'}: {shown}")
    return rows


def _grown(before: Amounts, after: Amounts) -> tuple[float, float, float]:
    """5th percentile, mean and 95th of how much larger the mean absolute error is, in points."""
    more = 100 * (abs(after - 1) - abs(before - 1))
    draws = np.random.default_rng(0).integers(0, len(more), (400, len(more)))
    low, high = np.quantile(more[draws].mean(axis=1), [0.05, 0.95])
    return float(low), float(more.mean()), float(high)


if __name__ == "__main__":
    sys.exit(main())
