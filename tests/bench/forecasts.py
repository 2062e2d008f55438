"""Runs of two engines, three models and four kinds of load, whose forecasts are then scored.

`python -m tests.bench.forecasts OUT --engine reference [--model small ...] [--round 2]`, on an idle machine:
ten runs a minute, each of some 4 s, one server for each model. A round has its own seed, lengths and
loads. The last line says how many figures of all runs in OUT were inside their intervals. The CPU must be
calibrated for each model (`--calibrate`).
"""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import replace
from pathlib import Path

from burstline.bench.progress import progress_for
from burstline.bench.repeats import SharedServer
from burstline.bench.run import carry_out
from burstline.bench.run_settings import Settings
from burstline.cli import main
from burstline.console.server_options import ServerOptions
from burstline.measure.record.rundir import open_run
from burstline.measure.stats.figure import Estimate
from burstline.models.model_folder import make_model
from burstline.roofline.model.families import bundled_config
from burstline.roofline.predict.forecast import Score
from burstline.servers.redact import Secret
from burstline.servers.settings import Settings as EngineSettings
from burstline.workloads.arrivals import parse_arrival
from burstline.workloads.load import load_of
from burstline.workloads.spec import LoadSpec

MODELS = {
    "tiny": {},
    "small": {
        "num_hidden_layers": 4,
        "hidden_size": 512,
        "intermediate_size": 1376,
        "num_attention_heads": 8,
    },
    "medium": {
        "num_hidden_layers": 6,
        "hidden_size": 768,
        "intermediate_size": 2048,
        "num_attention_heads": 12,
    },
}
ROUNDS = {
    1: {"prompt": "128", "output": "8..40", "closed": 8, "shares": (0.5, 0.8)},
    2: {"prompt": "64..192", "output": "24", "closed": 24, "shares": (0.35, 0.7)},
}
"""Streams of the closed loop, and the open loops' rates as shares of what the burst reached."""
ONE_CPU = EngineSettings(
    dtype="float32", max_num_seqs=32, max_model_len=1024, prefix_cache=False, cuda_graphs=0
)
LOAD_S = 4.0


def model_at(folder: Path, name: str) -> Path:
    """The model's folder, made where it is missing."""
    if not (folder / name / "config.json").exists():
        like = folder / f"{name}-like" / "config.json"
        like.parent.mkdir(parents=True, exist_ok=True)
        like.write_text(json.dumps(bundled_config("reference") | MODELS[name]))
        make_model(folder / name, str(like.parent), formats=("safetensors",), dtype="float32")
    return folder / name


def fire(engine: str, model: Path, out: Path, of: int) -> None:
    """A burst, a closed loop and two open loops at one server."""
    chosen, server = ROUNDS[of], SharedServer()
    one_core = Secret.words("--threads", "1") if engine == "reference" else ()
    where = ServerOptions(engine=engine, model=str(model), settings=ONE_CPU, engine_args=one_core)
    spec = LoadSpec(prompt_tokens=chosen["prompt"], output_tokens=chosen["output"], seed=of, requests=40)

    def run(**changes: object) -> float:
        made = Settings(where=where, load=load_of(replace(spec, **changes)), out=out, quiet=True)
        ended = carry_out(made, progress_for(quiet=True), server.serving, answer=True)
        figure = open_run(ended.run.path).summary.figure("throughput", "requests_per_s")
        return figure.point if isinstance(figure, Estimate) else math.nan  # only the burst's is used

    try:
        per_s = run()
        n = round(per_s * LOAD_S)
        run(concurrency=chosen["closed"], requests=max(n, 3 * chosen["closed"]))
        for share in chosen["shares"]:
            rate = float(f"{share * per_s:.3g}")
            run(rate=rate, arrival=parse_arrival("poisson"), requests=max(20, round(rate * LOAD_S)))
    finally:
        server.close()


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--engine", default="reference")
    parser.add_argument("--model", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--round", type=int, default=1, choices=list(ROUNDS))
    parser.add_argument("--calibrate", action="store_true", help="measure the CPU for these models instead")
    return parser.parse_args()


if __name__ == "__main__":
    args = parsed()
    for name in args.model:
        model = model_at(args.out / "models", name)
        if args.calibrate:
            main(["calibrate", "--device", "cpu", "--quick", "--model", str(model)])
        else:
            fire(args.engine, model, args.out / f"{args.engine}-{name}-{args.round}", args.round)
    scores = [
        score
        for path in sorted(args.out.glob("*/*/manifest.json"))
        if (summary := open_run(path.parent).summary) and isinstance(score := summary.forecast, Score)
    ]
    inside = [score.inside(name) for score in scores for name in score.measured]
    print(f"{sum(inside)} of {len(inside)} figures of {len(scores)} runs were inside their intervals")
