"""Whether --profile costs the load before it anything: the same load, in turn, at two servers.

    python -m tests.bench.profile [ENGINE [PAIRS [FILE]]]

One is started as for a run with --profile, its profiler ready and off, the other one without. Pairs alternate
their order (A B, B A). Prints each pair's ratio of throughputs, and their mean with its 95% interval, beside
how far loads at one server differ. FILE keeps the pairs of several calls.
"""

import json
import sys
import tempfile
from contextlib import redirect_stdout
from dataclasses import replace
from io import StringIO
from pathlib import Path

import numpy as np
import orjson
from scipy import stats

from burstline.bench.server_session import serving
from burstline.cli import main
from burstline.console.server_options import ServerOptions
from burstline.measure.record.rundir import open_run
from burstline.servers.registry import ENGINES
from burstline.servers.settings import Settings
from tests.servers.tiny_model import CONFIG, make_tiny_model

LOAD = "--requests 160 --concurrency 8 --prompt-tokens 128 --output-tokens 32"


def output_tok_per_s(folder: Path, engine: str, url: str, model: Path) -> float:
    words = f"run -q --no-canary --engine {engine} --url {url} --tokenizer {model} {LOAD} --out {folder}"
    with redirect_stdout(StringIO()):
        main(words.split())
    (path,) = folder.iterdir()
    columns = open_run(path).columns
    return float(np.nansum(columns.output_tok) / (np.nanmax(columns.closed_s) - np.nanmin(columns.sent_s)))


def measure(engine: str, n_pairs: int, pairs: list[tuple[float, float]], kept: Path | None) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = make_tiny_model(folder / "tiny")
        (model / "config.json").write_bytes(orjson.dumps(CONFIG | {"torch_dtype": "float32"}))
        plain = ServerOptions(model=str(model), settings=Settings(dtype="float32"), n_concurrent=8)
        if ENGINES[engine].brings_model:
            plain = ServerOptions()
        ready = replace(plain, profile=Path())
        for part in ("plain", "ready"):
            (folder / part).mkdir()
        with (
            serving(ENGINES[engine], plain, folder / "plain", lambda _: None) as without,
            serving(ENGINES[engine], ready, folder / "ready", lambda _: None) as with_profiler,
        ):
            urls = without.target.url, with_profiler.target.url
            for which in (0, 1):  # warm-up
                output_tok_per_s(folder / f"warm-up-{which}", engine, urls[which], model)
            for k in range(n_pairs):
                rates = [0.0, 0.0]
                for which in (0, 1) if k % 2 == 0 else (1, 0):
                    rates[which] = output_tok_per_s(folder / f"{k}-{which}", engine, urls[which], model)
                pairs.append((rates[0], rates[1]))
                if kept:
                    kept.write_text(json.dumps(pairs))
                ratio = rates[1] / rates[0] - 1
                print(f"{rates[0]:8.1f} tok/s without, {rates[1]:8.1f} with: {ratio:+.2%}", flush=True)


def print_difference(pairs: list[tuple[float, float]]) -> None:
    plain, ready = np.array(pairs).T
    ratios = np.log(ready / plain)
    half = stats.t.ppf(0.975, len(ratios) - 1) * np.std(ratios, ddof=1) / np.sqrt(len(ratios))
    mean, low, high = np.expm1(ratios.mean() + np.array([0, -half, half]))
    print(f"with its profiler ready {mean:+.2%}, 95% CI [{low:+.2%}, {high:+.2%}], {len(ratios)} pairs")
    print(f"loads without it differ by {np.std(plain, ddof=1) / np.mean(plain):.2%} (standard deviation)")


if __name__ == "__main__":
    engine = sys.argv[1] if len(sys.argv) > 1 else "reference"
    n_pairs = int(sys.argv[2]) if len(sys.argv) > 2 else 6
    kept = Path(sys.argv[3]) if len(sys.argv) > 3 else None
    pairs = json.loads(kept.read_text()) if kept and kept.exists() else []
    measure(engine, n_pairs, pairs, kept)
    print_difference(pairs)
