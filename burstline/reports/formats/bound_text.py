"""The output of `burstline bound` as text for a terminal."""

from collections.abc import Mapping, Sequence
from typing import Any

from burstline.reports.formats.text import columns
from burstline.reports.number_format import prefixed


def told(found: Mapping[str, Any]) -> str:
    asked, device = found["asked"], found["device"]
    ranks = " ".join(f"{kind}{n}" for kind, n in found["parallel"].items() if n > 1)
    title = (
        f"{found['model']['name']} ({found['model']['params']:,} parameters, {found['quant']['weights']})"
        f" on {device['name']}{' ' + ranks if ranks else ''}:"
        f" batch {asked['batch']}, {asked['n_prompt_tok']} in, {asked['n_output_tok']} out"
    )
    parts = [title, "", answer(found)]
    for name, phase in found["phases"].items():
        parts += ["", _sentence(name, phase), *_differ(phase), "", _phase_table(phase)]
    parts += ["", _outcome(found), _room(found["memory"]), ""]
    parts += [_what_ifs(found["what_if"]), "", _constants(found["constants"])]
    parts += ["", "Assumed:", *(f"- {line}" for line in found["assumed"])]
    return "\n".join(parts)


def _room(memory: Mapping[str, Any]) -> str:
    """What the cache holds: requests alone where windows keep a part of each, tokens too elsewhere."""
    low, high = (each / 1e9 for each in memory["kv_range_bytes"])
    per_tok, size = f"{memory['kv_bytes_per_tok']:,.0f} bytes a token", f"{memory['kv_bytes'] / 1e9:.1f} GB"
    size = size if memory["windows"] else f"{memory['kv_tok']:,} tokens ({size} at {per_tok})"
    fits = "yes" if memory["fits"] == "yes" else "within the band, some engines refuse to start"
    return (
        f"KV cache: {size} beside {memory['weight_bytes'] / 1e9:.1f} GB of weights a device; at most"
        f" {memory['largest_batch']:,} such requests at once. Fits: {fits} (reserves leave {low:.1f} to"
        f" {high:.1f} GB)."
    )


def answer(found: Mapping[str, Any]) -> str:
    """What limits each phase on this device, and where that changes."""
    told, name = found["answer"], f"{found['model']['name']} on {found['device']['name']}"
    sentences = []
    limits, ridge = told["limits"], told["ridge_tok"]
    if "decode" in limits:
        where = "at any batch" if ridge is None else f"up to batch {ridge - 1:,}"
        attention = "at any batch" if told["attention_memory_bound"] else f"at {told['context_tok']:,} tokens"
        kept = "memory" if told["attention_memory_bound"] else "compute"
        sentences.append(
            f"Decode of {name} is {limits['decode']}-bound here. Its products with weights are memory-bound"
            f" {where}, its attention {kept}-bound {attention}."
        )
    start = "with any prompt" if ridge is None else f"from {ridge:,} prompt tokens in a step on"
    kind = "memory" if ridge is None else "compute"
    sentences.append(f"Prefill is {limits['prefill']}-bound here; its products are {kind}-bound {start}.")
    return " ".join(sentences)


def _what_ifs(rows: Sequence[Mapping[str, Any]]) -> str:
    """One change a line, beside the request as it was asked."""
    base = rows[0]["latency_range_s"]
    header = ["What if", "latency s", "change", "output tok/s", "largest batch"]
    lines, refused = [], []
    for row in rows:
        if "impossible" in row:
            refused.append(f"{row['change']}: {row['impossible'].partition('. ')[0]}")
            continue
        low, high = row["latency_range_s"]
        n_out = row["output_tok_per_s"] * row["latency_s"]
        change = "" if row is rows[0] else _to(f"{low / base[1] - 1:+.0%}", f"{high / base[0] - 1:+.0%}")
        rate, took = _to(f"{n_out / high:,.0f}", f"{n_out / low:,.0f}"), _to(f"{low:.3f}", f"{high:.3f}")
        lines.append([row["change"], took, change, rate, f"{row['largest_batch']:,}"])
    found = "; ".join(dict.fromkeys(each for row in rows for each in row.get("differs", ())))
    note = [f"Ranges: engines' kernels differ here, {found}."] * bool(found)
    return "\n".join([columns([header, *lines], range(1)), *note, *refused])


def _to(low: str, high: str) -> str:
    """Both ends, or one text where they are the same."""
    return low if low == high else f"{low} to {high}"


def _differ(phase: Mapping[str, Any]) -> list[str]:
    low, high = map(_ms, phase["kernels_range_s"])
    sources = "; ".join(phase["differs"])
    return [f"Engines' kernels differ here: {low} to {high} ms ({sources})."] * bool(sources)


def _constants(rows: Sequence[Mapping[str, Any]]) -> str:
    lines = [
        [
            row["name"] + (" (own)" if row["own"] else ""),
            f"{row['value']:.3g}",
            f"{row['change_at_10_percent_more']:+.1%}",
        ]
        for row in sorted(rows, key=lambda row: -abs(row["change_at_10_percent_more"]))
    ]
    return columns([["Constant", "value", "latency if 10% larger"], *lines], range(1))


def _sentence(name: str, phase: Mapping[str, Any]) -> str:
    largest = max(phase["ops"], key=lambda op: op["share"])
    low, high = phase["range_s"]
    times = f"ceiling {_ms(phase['ceiling_s'])} ms, predicted {_ms(phase['predicted_s'])} ms"
    steps = "" if phase["n_steps"] == 1 else f" a step, {phase['n_steps']} steps"
    return (
        f"{name.capitalize()} is {phase['bound']}-bound ({times} ({_ms(low)} to {_ms(high)}){steps});"
        f" {largest['op']} takes most, {largest['share']:.0%}."
    )


def _phase_table(phase: Mapping[str, Any]) -> str:
    header = ["op", "M × N × K", "runs", "FLOPs", "bytes", "FLOP/B", "ridge", "bound by", "ideal µs"]
    header += ["predicted µs", "share", "constants"]
    rows = [_op_row(op) for op in phase["ops"] if op["ideal_us"] or op["predicted_us"]]
    return columns([header, *rows], (0, 1, 11))


def _op_row(op: Mapping[str, Any]) -> list[str]:
    shape = f"{op['m']:.5g} × {op['n']:.6g}" + (f" × {op['k']:.6g}" if op["k"] else "")
    groups = f"{op['groups']:.4g} × " if op["groups"] != 1 else ""
    where = f" ({op['level']})" if op["bound"] in ("memory", "communication") else ""
    return [
        op["op"],
        groups + shape,
        str(op["count"]),
        prefixed(op["flops"]) if op["flops"] else "",
        prefixed(op["bytes"]) if op["bytes"] else "",
        f"{op['intensity']:.1f}" if op["flops"] else "",
        f"{op['ridge']:.0f}" if op["ridge"] else "",
        op["bound"] + where,
        f"{op['ideal_us']:,.1f}",
        f"{op['predicted_us']:,.1f}",
        f"{op['share']:.1%}",
        " + ".join(op["by"]),
    ]


def _outcome(found: Mapping[str, Any]) -> str:
    return "\n".join(
        f"{by.capitalize()}: {seconds:.3f} s to the last token,"
        f" {found['output_tok_per_s'][by]:,.1f} output tok/s."
        for by, seconds in found["latency_s"].items()
    )


def compared(found: Sequence[Mapping[str, Any]]) -> str:
    """Several devices side by side; those that cannot hold the model say why."""
    possible = [one for one in found if "impossible" not in one]
    parts = ["\n".join(answer(one) for one in possible), _device_table(possible)]
    for one in possible:
        notes = [f"{name}: {note}" for name, phase in one["phases"].items() for note in _differ(phase)]
        parts.append("\n".join(f"{one['device']['name']}: {each}" for each in [*notes, _room(one["memory"])]))
    parts += [_bound_table(possible, name) for name in ("prefill", "decode")]
    parts += [f"{one['device']['name']}: {one['impossible']}" for one in found if "impossible" in one]
    assumed = list(dict.fromkeys(line for one in possible for line in one["assumed"]))
    parts += ["\n".join(["Assumed:", *(f"- {line}" for line in assumed)])] * bool(assumed)
    return "\n\n".join(part for part in parts if part)


def _device_table(possible: Sequence[Mapping[str, Any]]) -> str:
    header = ["device", "prefill by", "decode by", "prefill ms", "decode ms", "latency s", "tok/s"]
    header += ["KV tokens", "largest batch"]
    rows = []
    for one in possible:
        phases = [one["phases"].get(name) for name in ("prefill", "decode")]
        times = [phase and (phase["predicted_s"], *phase["range_s"]) for phase in phases]
        rows.append(
            [
                one["device"]["name"],
                *(phase["bound"] if phase else "" for phase in phases),
                *("{} ({} to {})".format(*map(_ms, each)) if each else "" for each in times),
                f"{one['latency_s']['predicted']:,.3f}",
                f"{one['output_tok_per_s']['predicted']:,.0f}",
                "" if one["memory"]["windows"] else f"{one['memory']['kv_tok']:,}",
                f"{one['memory']['largest_batch']:,}",
            ]
        )
    return columns([header, *rows], range(3)) if rows else ""


def _bound_table(possible: Sequence[Mapping[str, Any]], name: str) -> str:
    """Per op, what bounds it on each device and its ideal time there."""
    phases = [one["phases"][name] for one in possible if name in one["phases"]]
    if not phases:
        return ""
    header = [f"{name}, ideal", *(one["device"]["name"] for one in possible)]
    rows = [
        [ops[0]["op"], *(f"{op['bound']} {op['ideal_us']:,.0f} µs" for op in ops)]
        for ops in zip(*(phase["ops"] for phase in phases), strict=True)
        if ops[0]["kind"] != "elementwise"
    ]
    return columns([header, *rows], range(1))


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.2f}"
