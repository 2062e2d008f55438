"""Counted nouns and times in words, and what to write instead of an unknown word or another tool's flag."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Final

THEIRS: Final = {
    "--requests": "num-prompts num-requests request-count max-requests",
    "--sessions": "num-sessions conversation-num", "--turns": "session-turns-mean",
    "--prompt-tokens": "input-len random-input-len isl synthetic-input-tokens-mean",
    "--output-tokens": "output-len random-output-len osl output-tokens-mean sharegpt-output-len",
    "--shared-prefix": "random-prefix-len shared-system-prompt-length",
    "--rate": "request-rate", "--concurrency": "max-concurrency", "--arrival": "arrival-pattern",
    "--arrival gamma:X": "burstiness arrival-smoothness", "--deadline-s": "request-timeout-seconds",
    "--duration-s": "max-seconds benchmark-duration", "--url": "target base-url",
    "--data": "dataset-name dataset-path public-dataset input-file", "--seed": "random-seed",
    "--warmup": "num-warmups warmup-request-count", "--slo": "goodput", "--extra-body": "extra-inputs",
    "--lora": "lora-modules", "--out": "result-dir artifact-dir output-artifact-dir",
    "--workers": "workers-max",
    "each reply gets exactly --output-tokens": "ignore-eos", "every reply is streamed": "streaming",
    "the engine at --url is recognised; without --url, --engine starts one": "backend",
    "every run is kept below --out, with each request": "save-result save-detailed",
    "all percentiles are computed": "percentile-metrics metric-percentiles",
    "name a suite: burstline run FILE.toml": "config-file",
    "set the environment variable BURSTLINE_API_KEY": "api-key",
}  # fmt: skip
"""Our flags, or why none is needed, by those of vllm bench, guidellm, aiperf, genai-perf, inference-perf."""
OTHERS: Final = {name: ours for ours, names in THEIRS.items() for name in names.split()}
VERBS_OF_OTHERS: Final = {"bench": "run", "benchmark": "run", "profile": "run", "sweep": "run --rate 1,2"}


def counted(n: float, noun: str) -> str:
    """`1 request`, `1,000 requests`."""
    return f"{n:,.0f} {noun}{'' if n == 1 else 's'}"


def time_text(seconds: float) -> str:
    """`136 ms`, `1.26 s`: three digits at most."""
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"


def hint(word: str, known: Iterable[str]) -> str:
    """`did you mean --rate?`; for other words than flags all that are known, where none is near."""
    known, is_flag = list(known), word.startswith("-")
    ours = OTHERS.get(word.lstrip("-").replace("_", "-"), "")
    shown = ours if is_flag else ours.partition(" ")[0].lstrip("-").replace("-", "_")
    if ours and shown.partition(" ")[0] in known:
        return f"{word} is {shown} here"
    if ours and not ours.startswith("--"):
        return f"it is not needed: {ours}"
    near = difflib.get_close_matches(word, known, n=1, cutoff=0.6)
    if not is_flag and len(word) > 2:
        near = [each for each in known if word in each][:3] or near
    if near or is_flag:
        return f"did you mean {' or '.join(near)}?" if near else ""
    return f"expected one of: {', '.join(known)}"
