"""What two runs may differ in, by name: the engine, its version, its flags, the model, the machine.

A comparison varies some of these factors on purpose (`--vary max-num-seqs`); everything else must be equal.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Final

from loadgen.record.manifest import LoadFacts, Manifest
from loadgen.verdict.served_work import quantization_of
from servers.engine import Identity

NAMES: Final = {
    "gpu": "devices",
    "tp": "tensor-parallel",
    "tensor-parallel-size": "tensor-parallel",
    "max-num-batched-tokens": "max-batched-tok",
    "quantize": "quantization",
    "model-size": "model",
    "client": "cpu",
}
"""Other words for a factor, as people and engines say them."""
SETTINGS: Final = {
    "max-num-seqs": "max_num_seqs",
    "max-batched-tok": "max_batched_tok",
    "tensor-parallel": "tensor_parallel",
    "dtype": "dtype",
    "kv-dtype": "kv_dtype",
    "quantization": "quantization",
    "concurrency": "concurrency",
}
"""The settings that the gate checks on its own, by their factor."""


def canonical(name: str) -> str:
    """A factor's one name: `--max_num_seqs`, `max-num-seqs` and so on are the same."""
    plain = name.strip().lower().lstrip("-").replace("_", "-")
    return NAMES.get(plain, plain)


def factors_of(manifest: Manifest, passing: Collection[str] = ()) -> dict[str, str]:
    """Every factor of one run; flags in `passing` differ from start to start and are none."""
    identity, server = manifest.identity or Identity(manifest.engine), manifest.server
    argv = (server.argv if server else None) or ()
    config = manifest.hardware.model_config if manifest.hardware else None
    devices = Counter(device.name for device in manifest.devices)
    known = {
        "engine": manifest.engine,
        "version": identity.version,
        "workload": manifest.title or manifest.workload,
        "model": server.model_name if server else None,
        "devices": ", ".join(f"{n} x {name}" for name, n in devices.items()) or "none",
        "cpu": manifest.host.cpu,
        "cores": manifest.host.cores_allowed or manifest.host.cores,
        "governor": manifest.host.governor,
        "smt": manifest.host.smt,
        "numa-nodes": manifest.host.numa_nodes,
        "placement": None if server is None else ("attached" if server.attached else "same machine"),
        "server-addresses": server.addresses if server else None,
        "prompts": manifest.load.prompts if manifest.load else None,
        "warm-up": _warm_up(manifest.load) if manifest.load else None,
        "dtype": identity.dtype,
        "kv-dtype": identity.kv_dtype,
        "quantization": quantization_of(identity, argv or None, config),
        "max-num-seqs": identity.max_num_seqs,
        "max-batched-tok": identity.max_batched_tok,
        "tensor-parallel": identity.tensor_parallel,
    }
    flags = {name: value for name, value in _flags(argv[1:], passing).items() if name not in known}
    return {**flags, **{name: str(value) for name, value in known.items() if value is not None}}


def _warm_up(load: LoadFacts) -> str | int:
    """As it was asked: how many bursts an automatic warm-up needs is chance."""
    bursts = load.warm_up
    return f"bursts of {bursts.bursts[0].n}" if bursts else sum(stage.n for stage in load.stages)


def differing(runs: Sequence[Mapping[str, str]], most_in_flight: float | None = None) -> dict[str, list[str]]:
    """The factors in which runs differ, with each run's value ("not stated" where it has none).

    Of different engines, flags and versions differ anyway and are left out. A limit on the batch that none of
    the runs reached is no difference (`most_in_flight`: the most requests that were in flight at once).
    """
    several = len({run.get("engine") for run in runs}) > 1
    names = dict.fromkeys(name for run in runs for name in run)
    found = {}
    for name in names:
        values = [run.get(name, "not stated") for run in runs]
        known = {value for value in values if value != "not stated"}
        if several and name != "engine" and (name not in _SHARED or len(known) < 2):
            continue
        if len(set(values)) < 2 or (name in _MAY_BE_UNKNOWN and len(known) < 2):
            continue
        if name == "max-num-seqs" and most_in_flight and min(map(int, known)) >= most_in_flight:
            continue
        found[name] = values
    return found


_OF_THE_HOST: Final = ("governor", "smt", "numa-nodes")
_SHARED: Final = frozenset(
    {"engine", "workload", "model", "devices", "cpu", "cores", "placement", *_OF_THE_HOST, *SETTINGS}
)
"""Factors that mean the same at every engine. The form of prompts and the warm-up follow from the engine."""
_MAY_BE_UNKNOWN: Final = frozenset({*SETTINGS, *_OF_THE_HOST, "server-addresses", "prompts", "warm-up"})
"""Older runs and some kernels do not tell these: only two known values differ."""


def _flags(words: Sequence[str], passing: Collection[str]) -> dict[str, str]:
    """The flags of a command line by canonical name; a flag without a value is "on"."""
    flags: dict[str, str] = {}
    for word, following in zip(words, [*words[1:], ""], strict=False):
        flag, equals, value = word.partition("=")
        if not flag.startswith("-") or flag in passing:
            continue
        bare = not following or following.startswith("-")
        flags[canonical(flag)] = value if equals else "on" if bare else following
    return flags
