"""`burstline study training`: how long a training step takes, what bounds it, what fits in memory."""

import argparse
import json
import math
import shlex
from collections.abc import Iterator
from dataclasses import asdict, replace
from typing import Any

from burstline.console import exit_codes
from burstline.console.flags import flags_in, new_folder
from burstline.errors import RooflineError, tables_beside
from burstline.measure.record.verdict import Reason
from burstline.reports.blocks import Banner, Table, Tile, table
from burstline.reports.formats.predicted import Predicted
from burstline.reports.number_format import duration
from burstline.roofline.device.calibration import load_calibration
from burstline.roofline.device.device import Device, load_device
from burstline.roofline.model.families import load_model
from burstline.roofline.model.shapes import ELEMENT_BYTES
from burstline.roofline.training.recipe import KERNELS, Recipe, Sharding, three_level, zero, zero_plus_plus
from burstline.roofline.training.step import TrainingStep, training_memory, training_step
from burstline.workloads.options import flag_of

_RING = {"regather": True, "flat_ring": True}
_TABLES = tables_beside(__file__, "study.toml")
RECIPES: dict[str, dict[str, Any]] = _TABLES["recipes"]
OFF_BY: dict[str, str] = _TABLES["off_by"]
HOST_MS: float = RECIPES["eager"]["host_ms"]
WIDER = 1.25  # chosen: the LoRA and MT-NLG runs then lie inside
HELD = "163 of 167 measured steps, and 91% of 314 with nanotron on H100"
RANK_MS = 2.0  # more of it for each further tensor rank: set on half of nanotron's runs on H100
FLAGS = flags_in("study")
EXCHANGES = ("network_gb_per_s", "no_p2p", "wires", "overlap", "flat_ring")
DEFAULTS = dict.fromkeys(FLAGS) | _TABLES["defaults"]
_FASTEST_MFU = 0.642  # of measured runs: llm-foundry's, 7B on 8 A100 (tests/data/papers)
_MOST = 2**20  # of devices, tokens, sequences
_GB = 1e9


def given_of(args: argparse.Namespace) -> dict[str, Any]:
    return {name: getattr(args, name) for name in FLAGS if getattr(args, name) is not None}


def run(args: argparse.Namespace) -> int:
    """Print one recipe: its time, bounds and memory, and what other methods would give."""
    model, device, given = args.model, args.device, given_of(args)
    new_folder(args.out)
    recipe = recipe_of(model, device, given)
    if given.get("regather") and not _gathers_again(recipe):
        raise RooflineError("--regather would be ignored: it needs --recompute full and --zero 3; add them")
    idle = [name for name in EXCHANGES if name in given]
    if idle and given.get("devices") == 1:
        raise RooflineError(f"{flag_of(idle[0])} would be ignored: one device exchanges nothing")
    if recipe.recompute == "selective" and recipe.kernels.fused:
        raise RooflineError("--recompute selective would be ignored: it needs --kernels megatron; add that")
    calibration = load_calibration(recipe.device)
    step = training_step(recipe, calibration)
    # Without a recipe the step lies between these two, each times its factor.
    eager = {**RECIPES["eager"], "states": "fp32", **_RING, "host_ms": HOST_MS + RANK_MS * (recipe.tp - 1)}
    ends_s = [
        times * training_step(recipe_of(model, device, {**end, **given}), calibration).seconds
        for end, times in (({"overlap": 1.0}, 1.0), (eager, WIDER))
        if "recipe" not in given
    ]
    others = [(name, training_step(other, calibration)) for name, other in _methods(model, device, given)]
    trust = list(_trust(step, ends_s, given.get("recipe", "")))
    methods = {name: _facts(other) for name, other in others}
    facts = {**_facts(step), "range_s": ends_s or None, "notes": trust, "methods": methods}
    words = ["burstline", "study", "training", "--model", model, "--device", device]
    for name, value in given.items():
        words += [flag_of(name)] if value is True else [flag_of(name), str(value)]
    shown = _shown(step, others, trust, facts, shlex.join(words))
    if args.json:
        print(json.dumps(facts, indent=2))
    else:
        print(shown)
    if args.out is not None:
        from burstline.reports.page.prediction_page import write_prediction  # with matplotlib: a second

        write_prediction(shown, args.out, quiet=args.json)
    return exit_codes.DONE


def recipe_of(model_name: str, device_name: str, given: dict[str, Any]) -> Recipe:
    """The recipe that the flags describe; raises what is wrong with it."""
    asked = {**DEFAULTS, **RECIPES.get(given.get("recipe", ""), {}), **given}
    for name in (name for name, row in FLAGS.items() if row.get("type") == "int"):
        if asked[name] is not None and asked[name] < 1:
            raise RooflineError(f"{flag_of(name)} must be at least 1, not {asked[name]}")
        if asked[name] is not None and asked[name] > _MOST:
            raise RooflineError(f"{flag_of(name)} must be at most {_MOST}, not {asked[name]}")
    gb_per_s = asked["network_gb_per_s"]
    if gb_per_s is not None and not 0 < gb_per_s < math.inf:
        raise RooflineError(f"--network-gb-per-s {gb_per_s:g}: expected a number above 0")
    overlap, host_ms, stages = asked["overlap"], asked["host_ms"], asked["virtual_stages"]
    alone = asked["sequence_parallel"] and asked["tp"] == 1
    for is_wrong, why in (
        (not 0 <= overlap <= 1, f"--overlap {overlap:g}: expected a share from 0 to 1"),
        (not 0 <= host_ms < math.inf, f"--host-ms {host_ms:g}: expected 0 or more"),
        (
            stages > 1 == asked["pp"],
            f"--virtual-stages {stages} would be ignored: it splits stages; add --pp",
        ),
        (alone, "--sequence-parallel would be ignored: it splits over tensor ranks; add --tp"),
        (asked["lora"] and asked["qlora"], "--lora and --qlora are two methods; give one of them"),
    ):
        if is_wrong:
            raise RooflineError(why)
    model, device = load_model(model_name)[0], load_device(device_name)
    if asked["no_p2p"]:
        device = without_p2p(device)
    if gb_per_s is not None:
        device = device.with_network(gb_per_s * _GB)
    in_replica = asked["tp"] * asked["pp"]
    if asked["devices"] % in_replica:
        raise RooflineError(f"--tp times --pp, {in_replica}, does not divide --devices {asked['devices']}")
    n_ranks = asked["devices"] // in_replica
    return Recipe(
        model,
        device,
        asked["sequences"] or asked["micro_batch"] * n_ranks * asked["pp"],
        asked["seq"],
        sharding=sharding_of(asked, n_ranks, device),
        kernels=KERNELS[asked["kernels"]],
        adapter_rank=asked["lora"] or asked["qlora"] or 0,
        frozen="int4" if asked["qlora"] else "bf16",
        host_layer_s=asked["host_ms"] / 1e3,
        **{name: asked[name] for name in _TABLES["of_recipe"]},
    )


def without_p2p(device: Device) -> Device:
    """What devices of a node exchange crosses the host's memory, as with NCCL_P2P_DISABLE=1.

    Rate and latency were measured on two RTX 3090 behind PCIe 4 x16.
    """
    through_host = [link for link in device.links if link.kind == "PCIe via host"]
    if not through_host:
        raise RooflineError(f"--no-p2p: {device.name} has no link over PCIe and the host; leave --no-p2p out")
    slow = (replace(link, bytes_per_s=11.28e9, latency_s=15.2e-6) for link in through_host)
    return replace(device, links=tuple(slow))


def sharding_of(asked: dict[str, Any], n_ranks: int, device: Device) -> Sharding:
    """ZeRO's stage 0 to 3, ZeRO++ ("++") or the three-level scheme, on this device's package and node."""
    name, states = asked["zero"], asked["states"]
    reach = {link.scope: link.n_devices for link in device.links}
    if name.isdigit():
        sharding = zero(int(name), n_ranks, states=states)
    elif states != "fp32":
        raise RooflineError(f"--states {states} is for --zero 0 to 3, not for {name}; try --states fp32")
    elif name.startswith("++"):
        sharding = zero_plus_plus(n_ranks, reach.get("node", 1), 0.5 if name == "++" else 2)
    else:
        sharding = three_level(n_ranks, reach.get("package", 1), reach.get("node", 1))
    most = ELEMENT_BYTES[asked["wires"] or "fp32"]
    reduced = 4 if asked["qlora"] else sharding.reduce_bytes  # QLoRA's adapters are kept in fp32
    return replace(
        sharding,
        flat=asked["flat_ring"],
        regathers=asked["regather"],
        gather_bytes=min(sharding.gather_bytes, most),
        reduce_bytes=min(reduced, most),
    )


def _methods(model: str, device: str, given: dict[str, Any]) -> Iterator[tuple[str, Recipe]]:
    for stage in "0123":
        for recompute in ("none", "full"):
            flags = {**given, "zero": stage, "recompute": recompute}
            if stage != "3" and "offload" in given:
                flags["offload"] = "optimizer"
            recipe = recipe_of(model, device, flags)
            yield f"{recipe.sharding.name}, recompute {recompute}", recipe


def _trust(step: TrainingStep, ends_s: list[float], name: str) -> Iterator[str]:
    """How far to believe the answer, and what it assumes."""
    recipe, flat = step.recipe, step.recipe.sharding.flat
    if name:
        yield f"Steps with --recipe {name} are off measured ones by {OFF_BY[name]}."
    else:
        yield "Range: {:.3g} s (tuned, all hidden) to {:.3g} s (eager code and a quarter more).".format(
            *ends_s
        )
        yield f"Such ranges held {HELD}."
    if step.mfu > _FASTEST_MFU:
        yield f"No measured run here reached more than {_FASTEST_MFU:.0%} MFU: expect less speed."
    dtype, kernels = recipe.dtype, next(k for k, known in KERNELS.items() if known == recipe.kernels)
    host_ms = recipe.host_layer_s * 1e3
    again = " (weights gathered again)" if _gathers_again(recipe) else ""
    links = ", ".join(f"{link.bytes_per_s / _GB:.4g} GB/s ({link.kind})" for link in recipe.device.links)
    yield (
        f"Assumed: {kernels} kernels, {recipe.products or dtype} products, {recipe.wires or dtype} on wires,"
        f" {recipe.sharding.optimizer.bytes_:g} bytes of Adam's states a parameter, {host_ms:g}"
        f" ms of host time a layer;\nof data-parallel collectives ({'one flat ring' if flat else 'by tier'})"
        f" {recipe.overlap:.0%} of what computing can hide, of tensor-parallel ones nothing;"
        f"\nrecompute {recipe.recompute}{again}, offload {recipe.offload}, links of {links or 'no device'}."
    )


def _gathers_again(recipe: Recipe) -> bool:
    sharding = recipe.sharding
    return sharding.regathers and recipe.recompute == "full" and sharding.weights.degree > 1


def _tables(step: TrainingStep, others: list[tuple[str, TrainingStep]]) -> tuple[Table, ...]:
    memory = {**asdict(step.memory), "total": step.memory.total}
    gigabytes = [["kind", "GB"], *([name, f"{value / _GB:.2f}"] for name, value in memory.items())]
    tables = (
        ("Where a step's time goes", _time_rows(step), (0,)),
        ("What bounds each product (one micro-batch, all stages)", _op_rows(step), (0, 1, 5)),
        ("Memory of the fullest device", gigabytes, (0,)),
        ("The same with other methods", _method_rows(others), (0,)),
    )
    return tuple(table(title, head, rows, text=left) for title, (head, *rows), left in tables)


def _shown(
    step: TrainingStep, others: list[tuple[str, TrainingStep]], trust: list[str], facts: Any, command: str
) -> Predicted:
    """What is said of a step and of other methods, in a terminal and on its page."""
    recipe, methods = step.recipe, {"as asked": step, **dict(others)}
    part, part_s = max(step.parts_s.items(), key=lambda pair: pair[1])
    state, tone, mark = ("FITS", "good", "✓") if step.fits else ("DOES NOT FIT", "bad", "✕")
    tok_per_s, best = max([(each.tok_per_s, name) for name, each in others if each.fits], default=(0.0, ""))
    then = "Try more devices or --qlora"
    if tok_per_s > step.tok_per_s * step.fits:
        then = f"Try {best}. It would train on {tok_per_s:,.0f} tok/s."
    elif step.fits:
        then = "Keep this method. No other sharding or recomputation that fits is faster."
    n_tok = f"{recipe.n_seq} x {recipe.n_seq_tok:,} tokens"
    use = f"{step.flops_per_s / 1e12:.0f} TFLOP/s a device ({step.mfu:.0%} MFU)"
    *notes, assumed = (_room(step, tok_per_s, best), *trust)
    return Predicted(
        title=f"{recipe.model.name} on {recipe.n_devices} x {recipe.device.name}, {recipe.sharding.name}:"
        f" {step.seconds:.3g} s a step of {n_tok}, {step.tok_per_s:,.0f} tok/s, {use}.",
        verdict=Banner(state, tone, mark, notes[0], tuple(Reason("", note, "") for note in notes[1:])),
        tiles=(
            Tile("How fast?", f"{duration(step.seconds)} a step", f"{use}."),
            Tile("At what load?", f"{step.tok_per_s:,.0f} tok/s", f"{n_tok} a step."),
            Tile("What limits it?", part.capitalize(), f"{part_s / step.seconds:.0%} of the step."),
        ),
        then=then,
        tables=_tables(step, others),
        assumed=tuple(assumed.removeprefix("Assumed: ").replace("\n", " ").split("; ")),
        command=command,
        document=facts,
        seconds={name: other.parts_s for name, other in methods.items()},
        gigabytes={n: {k: v / _GB for k, v in asdict(other.memory).items()} for n, other in methods.items()},
        capacity_gb=recipe.device.memory.capacity_bytes / _GB,
    )


def _room(step: TrainingStep, tok_per_s: float, best: str) -> str:
    """Whether it fits, and how far; else `best`, the fastest method that does, with its tokens a second."""
    recipe, capacity = step.recipe, step.recipe.device.memory.capacity_bytes
    sizes = f"{step.memory.total / _GB:.1f} of {capacity / _GB:.1f} GB a device"
    if step.fits:
        return f"It fits: {sizes}; micro-batches of up to {largest_micro_batch(recipe)} fit."
    if best:
        return f"It does not fit: {sizes}. Fastest that does: {best} ({tok_per_s:,.0f} tok/s)."
    none = f"It does not fit: {sizes}. No sharding or recomputation of this many devices makes it fit;"
    return f"{none} try more devices or --qlora."


def largest_micro_batch(recipe: Recipe) -> int:
    """The largest power of two that fits; 0 where 1 does not."""
    n = recipe.sharding.n_ranks * recipe.n_micro
    tried = (replace(recipe, micro_batch=2**power, n_seq=2**power * n) for power in range(20))
    return max((each.micro_batch for each in tried if training_memory(each).fits(recipe.device)), default=0)


def _time_rows(step: TrainingStep) -> list[list[str]]:
    by_pass = dict.fromkeys(("forward", "backward", "recompute"), 0.0)
    for each in step.work:
        if each.op.kind != "collective":
            by_pass[each.during] += each.seconds
    whole, others = sum(by_pass.values()), step.parts_s
    compute_s = others.pop("compute")
    parts = {f"compute, {name}": compute_s * seconds / whole for name, seconds in by_pass.items()} | others
    rows = [
        [name, f"{part_s:.4g}", f"{part_s / step.seconds:.1%}"] for name, part_s in parts.items() if part_s
    ]
    hidden = [["(communication behind computing)", f"{step.hidden_s:.4g}", ""]] if step.hidden_s else []
    return [["part", "s", "share"], *rows, *hidden]


def _op_rows(step: TrainingStep) -> list[list[str]]:
    whole = sum(each.seconds for each in step.work)
    rows = [["op", "during", "M x N x K", "runs", "FLOP/B", "bound by", "s", "share"]]
    for each in step.work:
        op = each.op
        if op.kind not in ("matmul", "attention") or each.seconds < 0.005 * whole:
            continue
        size = f"{op.m:,.0f} x {op.n:,.0f} x {op.k:,.0f}"
        cells = [op.name, each.during, size, str(op.count), f"{op.intensity:.0f}", each.prediction.limit]
        rows.append([*cells, f"{each.seconds:.4g}", f"{each.seconds / whole:.1%}"])
    return rows


def _method_rows(others: list[tuple[str, TrainingStep]]) -> list[list[str]]:
    rows = [["method", "s a step", "tok/s", "MFU", "exposed", "GB a device", "fits"]]
    for name, step in others:
        cells = [f"{step.seconds:.3g}", f"{step.tok_per_s:,.0f}", f"{step.mfu:.0%}"]
        cells += [f"{step.exposed_s / step.seconds:.0%}", f"{step.memory.total / _GB:.1f}"]
        rows.append([name, *cells, "yes" if step.fits else "no"])
    return rows


def _facts(step: TrainingStep) -> dict[str, Any]:
    names = ("seconds", "tok_per_s", "flops_per_s", "mfu", "compute_s", "tensor_s", "bubble_s", "exposed_s")
    return {
        **{name: getattr(step, name) for name in (*names, "hidden_s", "optimizer_s", "host_s", "fits")},
        "memory_bytes": {**asdict(step.memory), "total": step.memory.total},
    }
