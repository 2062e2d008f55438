"""What to write instead of an unknown word: the nearest known one, or ours for another tool's flag."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Final

OTHERS: Final[Mapping[str, str]] = {
    "num-prompts": "--requests", "num-requests": "--requests", "request-count": "--requests",
    "max-requests": "--requests", "num-sessions": "--sessions", "conversation-num": "--sessions",
    "session-turns-mean": "--turns",
    "input-len": "--prompt-tokens", "random-input-len": "--prompt-tokens", "isl": "--prompt-tokens",
    "synthetic-input-tokens-mean": "--prompt-tokens",
    "output-len": "--output-tokens", "random-output-len": "--output-tokens", "osl": "--output-tokens",
    "output-tokens-mean": "--output-tokens", "sharegpt-output-len": "--output-tokens",
    "random-prefix-len": "--shared-prefix", "shared-system-prompt-length": "--shared-prefix",
    "request-rate": "--rate", "max-concurrency": "--concurrency", "max-seconds": "--duration-s",
    "benchmark-duration": "--duration-s", "request-timeout-seconds": "--deadline-s",
    "burstiness": "--arrival gamma:X", "arrival-smoothness": "--arrival gamma:X",
    "arrival-pattern": "--arrival", "target": "--url", "base-url": "--url", "backend": "--engine",
    "dataset-name": "--data", "dataset-path": "--data", "public-dataset": "--data", "input-file": "--data",
    "num-warmups": "--warmup", "warmup-request-count": "--warmup", "random-seed": "--seed",
    "goodput": "--slo", "extra-inputs": "--extra-body", "lora-modules": "--lora",
    "result-dir": "--out", "artifact-dir": "--out", "output-artifact-dir": "--out",
    "workers-max": "--workers",
}  # fmt: skip
"""Flags of vllm bench serve, guidellm, aiperf and genai-perf, without dashes, and what says the same here."""
NEEDLESS: Final[Mapping[str, str]] = {
    "ignore-eos": "each reply gets exactly --output-tokens",
    "streaming": "every reply is streamed",
    "save-result": "every run is kept below --out",
    "save-detailed": "every run keeps each of its requests",
    "percentile-metrics": "all percentiles are computed",
    "metric-percentiles": "all percentiles are computed",
    "config_file": "name the suite: `burstline run FILE.toml`",
    "api-key": "set the environment variable BURSTLINE_API_KEY",
}
"""Those that need no flag here, and why."""
VERBS_OF_OTHERS: Final[Mapping[str, str]] = {
    **dict.fromkeys(("bench", "benchmark", "profile", "load-test"), "run"),
    "sweep": "run --rate 1,2,4",
    "analyze": "report",
}


def hint(word: str, known: Iterable[str]) -> str:
    """`did you mean --rate?`; the known words where none is near.

    A flag may have its dashes, or be a key of a table or an argument: `num_prompts`.
    """
    known = list(known)
    plain = word.lstrip("-")
    name, is_flag = plain.replace("_", "-"), word.startswith("-")
    ours = OTHERS.get(name, "")
    shown = ours if is_flag else ours.partition(" ")[0].lstrip("-").replace("-", "_")
    if ours and shown.partition(" ")[0] in known:
        return f"{word} is {shown} here"
    if why := NEEDLESS.get(name) or NEEDLESS.get(plain):
        return f"it is not needed: {why}"
    near = difflib.get_close_matches(word, known, n=1, cutoff=0.6)
    if not is_flag and len(word) > 2:
        near = [each for each in known if word in each][:3] or near
    if near:
        return f"did you mean {' or '.join(near)}?"
    return "" if is_flag else f"expected one of: {', '.join(known)}"
