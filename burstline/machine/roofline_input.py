"""A run held against its hardware: what its folder says, as the roofline wants it, and the answer as JSON."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any, Final

import numpy as np

from burstline.machine.cpu_calibration import DTYPES, MOST_OTHERS
from burstline.machine.hardware import DEVICE_FILE
from loadgen.record.columns import Columns, Floats
from loadgen.record.rundir import Run
from loadgen.verdict.verdict import Reason
from roofline.device.calibration import read_calibration
from roofline.device.device import read_device
from roofline.errors import RooflineError
from roofline.model.families import quant_of
from roofline.model.parallel import Parallel
from roofline.model.shapes import ModelShape, Quant
from roofline.model.step import Step
from roofline.predict.simulate import Asked, Limits
from roofline.reconcile import reconciliation
from roofline.reconcile.inferred_steps import Streamed, steps_seen
from roofline.reconcile.reconcile import reconcile
from roofline.reconcile.reconciliation import Setup, StepSeen
from servers.engine import Admission
from servers.registry import ENGINES

MOST_REQUESTS: Final = 20_000
"""More are not simulated: it would take minutes."""

_TIMED_WITH_ATTENTION: Final = "rope+kv_write+attention"
"""What the embedded engine's step log books as attention."""


class _LackingError(Exception):
    """Why a run cannot be held against its hardware."""


def reconciled(run: Run) -> dict[str, Any]:
    """The summary's `roofline`: the reconciliation, its device and the plot's rates; else {"absent": why}.

    From the run's own files alone: the same files give the same answer.
    """
    try:
        setup, assumed = setup_of(run)
        seen = seen_in(run, assumed)
        found = reconcile(seen, setup)
    except (_LackingError, RooflineError) as why:
        return {"absent": str(why)}
    return asdict(found) | {"device": _device_facts(setup), "model": _model_facts(setup, run)}


def beside_others(found: dict[str, Any], instrument: Mapping[str, Any]) -> dict[str, Any]:
    """The same, with a word on who else used the CPU it ran on: their share is no gap of the engine's."""
    others = instrument["others_cpu_fraction"].get("point")
    if found.get("device", {}).get("measured_spread") is None or not others or others <= MOST_OTHERS:
        return found
    said = f"Others used {others:.0%} of this machine meanwhile, which is part of the gap."
    return found | {"sentence": f"{found['sentence']} {said}"}


def suspect(found: Mapping[str, Any]) -> tuple[Reason, ...]:
    """Reasons not to believe a run: rates above what the hardware can do."""
    return tuple(
        Reason(
            "beats-the-ceiling",
            f"Numbers suspect: {each['what']} went {each['excess']:.0%} faster than {found['device']['name']}"
            f" can go at all (tolerance {each['tolerance']:.0%}).",
            f"Look for the cause: {'; or '.join(each['causes'])}.",
        )
        for each in found.get("suspicions", ())
    )


def setup_of(run: Run) -> tuple[Setup, list[str]]:
    """What ran on what, and what had to be assumed about it."""
    hardware = run.manifest.get("hardware")
    if hardware is None:
        raise _LackingError(
            "the run does not say what it ran on; `burstline report RUN --device NAME` adds it"
        )
    path = run.path / DEVICE_FILE
    if "absent" in hardware or not path.exists():
        raise _LackingError(hardware.get("absent", f"{DEVICE_FILE} is gone from the run's folder"))
    config, identity = hardware["model_config"], run.identity
    table = tomllib.loads(path.read_text("utf-8"))
    device, calibration = read_device(table["id"], table), read_calibration(table["calibration"])
    if calibration.host and calibration.host.engine != run.manifest.get("engine"):
        calibration = replace(calibration, host=None)
    model = ModelShape.from_config(config, str(identity.model if identity else "") or None)
    quant, assumed = _quant(
        config, identity.dtype if identity else None, identity.kv_dtype if identity else None
    )
    tp = identity.tensor_parallel if identity else None
    if tp is None:
        assumed.append("tensor parallelism is not said: 1")
    return Setup(model, quant, Parallel(tp=tp or 1), device, calibration), assumed


def _quant(config: Mapping[str, Any], dtype: str | None, kv_dtype: str | None) -> tuple[Quant, list[str]]:
    """How numbers are kept: as the engine says, else as the checkpoint does."""
    stored = quant_of(config)
    ours = DTYPES.get(str(dtype))
    assumed = [] if ours else [f"the engine does not say its dtype: the checkpoint's, {stored.activations}"]
    if ours and config.get("quantization_config") is None:
        stored = Quant(ours, ours, ours)
    elif ours:
        stored = replace(stored, kv=ours)
    if str(kv_dtype).startswith("fp8"):
        stored = replace(stored, kv="fp8")
    return stored, assumed


def seen_in(run: Run, assumed: list[str]) -> reconciliation.Run:
    """What was measured; what had to be guessed for it is added to `assumed`."""
    c = run.columns
    n_replies = int(np.count_nonzero(np.diff(c.starts)))
    if not n_replies:
        raise _LackingError("no request got a token")
    if n_replies > MOST_REQUESTS:
        raise _LackingError(f"{n_replies:,} requests are too many to simulate; at most {MOST_REQUESTS:,}")
    replies = list(_replies(c))
    limits = _limits(run, replies, assumed)
    steps = _logged(run, replies)
    if steps is None and _counted(run):
        steps = steps_seen(replies, limits.max_num_batched_tokens)
        assumed.append("steps are read off the wire: each gap in a chain of long replies is one step")
    due_s = min(reply.sent_s for reply in replies)
    return reconciliation.Run(
        requests=[Asked(reply.sent_s, reply.prompt_tok, len(reply.token_s)) for reply in replies],
        makespan_s=max(float(reply.token_s[-1]) for reply in replies) - due_s,
        limits=limits,
        steps=steps or None,
        assumed=tuple(assumed),
    )


def _counted(run: Run) -> bool:
    """Whether it is known for every reply which of its events carries how many tokens."""
    return not set(run.request_table.column("split").to_pylist()) & {"spread", "unknown"}


def _replies(c: Columns) -> Iterator[Streamed]:
    """Every request that got a token; tokens that came in one event lie evenly in the gap before it."""
    for i in range(len(c)):
        at_s, n = c.event_s[c.starts[i] : c.starts[i + 1]], c.event_n[c.starts[i] : c.starts[i + 1]]
        if not len(at_s):
            continue
        prompt = c.prompt_tok[i] if c.prompt_tok[i] > 0 else c.planned_prompt_tok[i]
        cached = min(int(np.nan_to_num(c.cached_tok[i])), int(prompt) - 1)
        yield Streamed(float(c.sent_s[i]), int(prompt), _token_s(at_s, n.astype(int)), cached)


def _token_s(at_s: Floats, n: Any) -> Floats:
    gap_s = np.diff(at_s, prepend=at_s[:1])
    behind = np.concatenate([np.arange(k - 1, -1, -1) / k for k in n])
    return np.asarray(np.repeat(at_s, n) - np.repeat(gap_s, n) * behind)


def _limits(run: Run, replies: Sequence[Streamed], assumed: list[str]) -> Limits:
    """The engine's limits in its own words; what it does not say is as much as was seen in use."""
    identity, engine = run.identity, str(run.manifest.get("engine"))
    block_tok = (identity.kv_block_tok if identity else None) or 16
    seqs, batched, kv_tok = (
        (identity.max_num_seqs, identity.max_batched_tok, identity.kv_tok) if identity else (None, None, None)
    )
    n_at_once, tok_at_once = _most_at_once(replies, block_tok)
    if seqs is None:
        seqs = n_at_once
        assumed.append(f"max_num_seqs is not said: {seqs:,}, the most that were seen to decode at once")
    if batched is None:
        batched = max(2048, seqs)
        assumed.append(f"max_num_batched_tokens is not said: {batched:,}")
    if kv_tok is None:
        kv_tok = tok_at_once
        assumed.append(f"the KV cache's size is not said: {kv_tok:,} tokens, the most that were seen in use")
    admission = ENGINES[engine].admission if engine in ENGINES else None
    if admission is None:
        admission = Admission()
        assumed.append("requests are admitted by vLLM V1's rules")
    elif admission.reserve_output:
        assumed.append(f"requests are admitted as {engine} does: whole prompts, room for the whole output")
    return Limits(seqs, batched, kv_tok, block_tok, admission.chunked_prefill, admission.reserve_output)


def _most_at_once(replies: Sequence[Streamed], block_tok: int) -> tuple[int, int]:
    """Requests between their first and their last token, and the tokens in their blocks, at the fullest."""
    first = np.array([reply.token_s[0] for reply in replies])
    last = np.array([reply.token_s[-1] for reply in replies])
    blocks = np.array([-(-(reply.prompt_tok + len(reply.token_s)) // block_tok) for reply in replies])
    order = np.argsort(np.concatenate([first, last]), kind="stable")
    ones = np.concatenate([np.ones(len(first), dtype=np.int64), -np.ones(len(first), dtype=np.int64)])
    n = np.cumsum(ones[order]).max()
    tok = np.cumsum((ones * np.concatenate([blocks, blocks]))[order]).max() * block_tok
    return int(n), int(max(tok, blocks.max() * block_tok))


def _logged(run: Run, replies: Sequence[Streamed]) -> list[StepSeen] | None:
    """The engine's own step log from the load's start on; None where it keeps none."""
    if run.steps is None:
        return None
    begin_ns = min(reply.sent_s for reply in replies) * 1e9
    steps = run.steps[run.steps["end_ns"] > begin_ns]
    # A request that decodes next was there already, and so was one that waits: the engine did not idle.
    at_once = (steps["n_waiting"] > 0) | (steps["decode_tok"].shift(-1) > 0)
    steps = steps.assign(until_ns=steps["start_ns"].shift(-1).where(at_once, steps["end_ns"]))
    rows = steps.to_dict("records")
    return [_logged_step({str(name): value for name, value in row.items()}) for row in rows] or None


def _logged_step(row: Mapping[str, Any]) -> StepSeen:
    """A step lasts until the next begins, where that follows at once: the host's part is in it."""
    new_tok, context = list(row["new_tok"]), list(row["context_tok"])
    # Only the last request's chunk can have been cut by the budget, so that it has no logits yet.
    logits = [1] * (len(new_tok) - 1) + [int(row["n_logits"]) - len(new_tok) + 1]
    gemms = {
        name.removesuffix("_ns").removesuffix("_proj"): float(ns) / 1e9
        for name, ns in row.items()
        if name.endswith("_proj_ns") or name == "lm_head_ns"
    }
    seconds = (row["until_ns"] - row["start_ns"]) / 1e9
    timed = gemms | {_TIMED_WITH_ATTENTION: row["attention_ns"] / 1e9}
    return StepSeen(Step.of(zip(new_tok, context, logits, strict=True)), seconds, timed)


def _device_facts(setup: Setup) -> dict[str, Any]:
    """The device's ceilings in the dtype that computes, and what a good kernel of that dtype reaches."""
    device, dtype = setup.device, setup.quant.activations
    peak = device.peak_flops_per_s(dtype)
    fit = setup.calibration.gemm_fit(dtype)[0] if setup.calibration else None
    return {
        "id": device.id,
        "name": device.name,
        "dtype": dtype,
        "n_devices": setup.parallel.n_devices,
        "peak_flops_per_s": peak,
        "levels": [asdict(level) for level in device.levels],
        "reached_flops_per_s": fit.eta_c * peak if fit else None,
        "reached_bytes_per_s": fit.eta_m * device.bytes_per_s if fit else None,
        "measured_spread": setup.calibration.measured_spread if setup.calibration else None,
        "host": asdict(setup.calibration.host) if setup.calibration and setup.calibration.host else None,
    }


def _model_facts(setup: Setup, run: Run) -> dict[str, Any]:
    hardware = run.manifest["hardware"]
    return {
        "name": setup.model.name,
        "params": setup.model.params(),
        "quant": asdict(setup.quant),
        "config_from": hardware.get("model_from"),
        "device_from": hardware.get("device_from"),
    }
