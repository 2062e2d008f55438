"""What to write instead of an unknown word: the nearest known one, or ours for another tool's flag."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Final

THEIRS: Final = {
    "--requests": "num-prompts num-requests request-count max-requests",
    "--sessions": "num-sessions conversation-num", "--turns": "session-turns-mean",
    "--prompt-tokens": "input-len random-input-len isl synthetic-input-tokens-mean",
    "--output-tokens": "output-len random-output-len osl output-tokens-mean sharegpt-output-len",
    "--shared-prefix": "random-prefix-len shared-system-prompt-length",
    "--rate": "request-rate", "--concurrency": "max-concurrency", "--arrival": "arrival-pattern",
    "--arrival gamma:X": "burstiness arrival-smoothness", "--deadline-s": "request-timeout-seconds",
    "--duration-s": "max-seconds benchmark-duration", "--url": "target base-url", "--engine": "backend",
    "--data": "dataset-name dataset-path public-dataset input-file", "--seed": "random-seed",
    "--warmup": "num-warmups warmup-request-count", "--slo": "goodput", "--extra-body": "extra-inputs",
    "--lora": "lora-modules", "--out": "result-dir artifact-dir output-artifact-dir",
    "--workers": "workers-max",
}  # fmt: skip
"""Our flags by those of vllm bench serve, guidellm, aiperf and genai-perf, without dashes."""
OTHERS: Final = {name: ours for ours, names in THEIRS.items() for name in names.split()}
NEEDLESS: Final[Mapping[str, str]] = {
    "ignore-eos": "each reply gets exactly --output-tokens", "streaming": "every reply is streamed",
    "save-result": "every run is kept below --out", "save-detailed": "every run keeps each of its requests",
    "percentile-metrics": "all percentiles are computed", "metric-percentiles": "all are computed",
    "config_file": "name a suite: run FILE.toml", "api-key": "set the variable BURSTLINE_API_KEY",
}  # fmt: skip
"""Those that need no flag here, and why."""
VERBS_OF_OTHERS: Final = {"bench": "run", "benchmark": "run", "profile": "run", "sweep": "run --rate 1,2"}


def hint(word: str, known: Iterable[str]) -> str:
    """`did you mean --rate?`; for other words than flags all that are known, where none is near."""
    known, plain, is_flag = list(known), word.lstrip("-"), word.startswith("-")
    ours = OTHERS.get(plain.replace("_", "-"), "")
    shown = ours if is_flag else ours.partition(" ")[0].lstrip("-").replace("-", "_")
    if ours and shown.partition(" ")[0] in known:
        return f"{word} is {shown} here"
    if why := NEEDLESS.get(plain) or NEEDLESS.get(plain.replace("_", "-")):
        return f"it is not needed: {why}"
    near = difflib.get_close_matches(word, known, n=1, cutoff=0.6)
    if not is_flag and len(word) > 2:
        near = [each for each in known if word in each][:3] or near
    if near or is_flag:
        return f"did you mean {' or '.join(near)}?" if near else ""
    return f"expected one of: {', '.join(known)}"
