"""What `burstline bound` says, in a terminal and on its page; `burstline study` has the same form."""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from burstline.measure.record.verdict import Reason
from burstline.reports.blocks import Banner, Table, Tile, table
from burstline.reports.formats.text import text
from burstline.reports.number_format import duration, prefixed
from burstline.roofline.reconcile.reconciliation import DeviceFacts, PhaseRow

PHASES: Final = "decode", "prefill"
QUESTIONS: Final = "How fast?", "At what load?", "What limits it?"


@dataclass(frozen=True, slots=True)
class Predicted:
    """A prediction in words and tables, and what its pictures are drawn from.

    `then` is what to do next, `document` what `--json` prints. `phases` are predicted steps on each of
    `devices`. Of several methods `seconds` are a step's and `gigabytes` a device's, by method and part;
    a device has `capacity_gb`.
    """

    title: str
    verdict: Banner
    tiles: tuple[Tile, ...]
    then: str
    tables: tuple[Table, ...]
    assumed: tuple[str, ...]
    command: str
    document: Any
    devices: tuple[DeviceFacts, ...] = ()
    phases: tuple[tuple[PhaseRow, ...], ...] = ()
    seconds: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    gigabytes: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    capacity_gb: float = 0.0

    def __str__(self) -> str:
        said = [self.verdict.sentence, *(reason.text for reason in self.verdict.reasons)]
        assumed = ["Assumed:", *(f"- {line}" for line in self.assumed)] if self.assumed else []
        parts = [self.title, "\n".join(said), *(text([each]) for each in self.tables), "\n".join(assumed)]
        return "\n\n".join(filter(None, parts))


Steps = Sequence[tuple[DeviceFacts, tuple[PhaseRow, ...]]]
"""One of each phase on each device that is possible."""


def shown(found: Sequence[Mapping[str, Any]], model: str, command: str = "", steps: Steps = ()) -> Predicted:
    """What is said of one device, or of several, of which the fastest stands first."""
    possible = [one for one in found if "impossible" not in one]
    possible.sort(key=lambda one: one["latency_s"]["predicted"])
    of_several, n = len(found) > 1, len(possible)
    state, tone, mark = "FITS", "good", "✓"
    if n < len(found):
        state, tone, mark = (f"{n} OF {len(found)} FIT", "warn", "!") if n else ("NONE FITS", "bad", "✕")
    elif any(one["memory"]["fits"] != "yes" for one in possible):
        state, tone, mark = "MAY NOT FIT", "warn", "!"
    tiles, tables, then = list[Tile](), list[Table](), "Try a smaller data type, or more devices"
    if possible:
        tiles = [_tile(k, possible, of_several=of_several) for k in range(len(QUESTIONS))]
        then = _then(possible[0], model, of_several=of_several)
        tables = [_phase_table(*phase) for phase in possible[0]["phases"].items()]
        tables += [_what_ifs(possible[0]["what_if"]), _constants(possible[0]["constants"])]
    if of_several:
        tables = [_device_table(possible), *(_bound_table(possible, phase) for phase in PHASES[::-1])]
    impossible = (f"{one['device']['name']}: {one['impossible']}" for one in found if "impossible" in one)
    told = [*map(answer, possible[:1]), *impossible, *map(answer, possible[1:])]
    for one in possible:
        of = f"{one['device']['name']}: " * of_several
        phases = [] if of_several else [_sentence(*each) for each in one["phases"].items()]
        differ = [f"{name}: {note}" for name, phase in one["phases"].items() for note in _differ(phase)]
        told += [f"{of}{each}" for each in (*phases, *differ, *_outcome(one), _room(one["memory"]))]
    return Predicted(
        title=_title(found, possible, model),
        verdict=Banner(state, tone, mark, told[0], tuple(Reason("", each, "") for each in told[1:])),
        tiles=tuple(tiles),
        then=then,
        tables=tuple(each for each in tables if each.rows),
        assumed=tuple(dict.fromkeys(line for one in possible for line in one["assumed"])),
        command=command,
        document=found if of_several else found[0],
        devices=tuple(device for device, _ in steps),
        phases=tuple(phases for _, phases in steps),
    )


def _title(found: Sequence[Mapping[str, Any]], possible: Sequence[Mapping[str, Any]], model: str) -> str:
    """The model and how it is stored, the devices, the load."""
    devices, ranks, load = ", ".join(one["device"]["name"] for one in found), "", ""
    for one in possible[:1]:
        asked = one["asked"]
        ranks = "".join(f" {kind}{n}" for kind, n in one["parallel"].items() if n > 1)
        load = f": batch {asked['batch']}, {asked['n_prompt_tok']} in, {asked['n_output_tok']} out"
        model = f"{one['model']['name']} ({one['model']['params']:,} parameters, {one['quant']['weights']})"
    return f"{model} on {devices}{ranks}{load}"


def _tile(k: int, possible: Sequence[Mapping[str, Any]], *, of_several: bool) -> Tile:
    """One of QUESTIONS: its answer for the first device, below it more of it or those of the others."""
    answers = [(one["device"]["name"], *_answers(one)[k]) for one in possible]
    (name, value, detail), *others = answers
    if not of_several:
        return Tile(QUESTIONS[k], value, detail)
    return Tile(QUESTIONS[k], f"{value} on {name}", "; ".join(f"{other}: {own}" for other, own, _ in others))


def _answers(found: Mapping[str, Any]) -> list[tuple[str, str]]:
    """To each of QUESTIONS a short answer, and a line below it."""
    phases, took, rate = found["phases"], found["latency_s"], found["output_tok_per_s"]["predicted"]
    first_s = sum(each["n_steps"] * each["predicted_s"] for name, each in phases.items() if name != "decode")
    speed = f"{duration(first_s)} of prefill"
    if "decode" in phases:
        speed += f", then {duration(phases['decode']['predicted_s'])} per token"
    last = f"{duration(took['predicted'])} to the last token; {duration(took['ceiling'])} at the ceiling."
    limits = {name: phases[name]["bound"] for name in PHASES if name in phases}
    kinds, first = [*dict.fromkeys(limits.values())], next(iter(limits))
    limit = " and ".join(f"{kind} in {name}" for name, kind in limits.items()) if kinds[1:] else kinds[0]
    largest = max(phases[first]["ops"], key=lambda op: op["share"])
    fit = f"At most {found['memory']['largest_batch']:,} such requests fit at once."
    most = f"{largest['op']} takes most of {first}, {largest['share']:.0%}."
    return [(speed, last), (f"{rate:,.0f} output tok/s", fit), (f"{limit[:1].upper()}{limit[1:]}", most)]


def _then(found: Mapping[str, Any], model: str, *, of_several: bool) -> str:
    """The change that would shorten the latency most, of several devices where these are told."""
    if of_several:
        alone = f"burstline bound --model {shlex.quote(model)} --device {found['device']['id']}"
        return f"Look at {found['device']['name']} alone. Run `{alone}`: it shows what would change it."
    base, *others = (row for row in found["what_if"] if "impossible" not in row)
    best = min(others, key=lambda row: row["latency_s"], default=base)
    if best["latency_s"] >= base["latency_s"]:
        return "Try a smaller batch. No other change takes less time."
    times = [duration(row["latency_s"]) for row in (best, base)]
    return f"Try {best['change']}. It would take {times[0]} to the last token instead of {times[1]}."


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


def _what_ifs(rows: Sequence[Mapping[str, Any]]) -> Table:
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
    return table("One change at a time", header, lines, remark="\n".join([*note, *refused]))


def _to(low: str, high: str) -> str:
    """Both ends, or one text where they are the same."""
    return low if low == high else f"{low} to {high}"


def _differ(phase: Mapping[str, Any]) -> list[str]:
    low, high = map(_ms, phase["kernels_range_s"])
    sources = "; ".join(phase["differs"])
    return [f"Engines' kernels differ here: {low} to {high} ms ({sources})."] * bool(sources)


def _constants(rows: Sequence[Mapping[str, Any]]) -> Table:
    change = "change_at_10_percent_more"
    rows = sorted(rows, key=lambda row: -abs(row[change]))
    lines = [
        [row["name"] + " (own)" * row["own"], f"{row['value']:.3g}", f"{row[change]:+.1%}"] for row in rows
    ]
    return table("Constants of the prediction", ["Constant", "value", "latency if 10% larger"], lines)


def _sentence(name: str, phase: Mapping[str, Any]) -> str:
    largest = max(phase["ops"], key=lambda op: op["share"])
    low, high = phase["range_s"]
    times = f"ceiling {_ms(phase['ceiling_s'])} ms, predicted {_ms(phase['predicted_s'])} ms"
    steps = "" if phase["n_steps"] == 1 else f" a step, {phase['n_steps']} steps"
    return (
        f"{name.capitalize()} is {phase['bound']}-bound ({times} ({_ms(low)} to {_ms(high)}){steps});"
        f" {largest['op']} takes most, {largest['share']:.0%}."
    )


def _phase_table(name: str, phase: Mapping[str, Any]) -> Table:
    header = ["op", "M × N × K", "runs", "FLOPs", "bytes", "FLOP/B", "ridge", "bound by", "ideal µs"]
    header += ["predicted µs", "share", "constants"]
    rows = [_op_row(op) for op in phase["ops"] if op["ideal_us"] or op["predicted_us"]]
    return table(
        f"Operations of {name}", header, rows, text=(0, 1, 11), id=f"bounds-{name}".replace(" ", "-")
    )


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


def _outcome(found: Mapping[str, Any]) -> list[str]:
    return [
        f"{by.capitalize()}: {seconds:.3f} s to the last token,"
        f" {found['output_tok_per_s'][by]:,.1f} output tok/s."
        for by, seconds in found["latency_s"].items()
    ]


def _device_table(possible: Sequence[Mapping[str, Any]]) -> Table:
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
    return table("Each device", header, rows, text=range(3))


def _bound_table(possible: Sequence[Mapping[str, Any]], name: str) -> Table:
    """Per op, what bounds it on each device and its ideal time there."""
    phases = [one["phases"][name] for one in possible if name in one["phases"]]
    header = [f"{name}, ideal", *(one["device"]["name"] for one in possible)]
    rows = [
        [ops[0]["op"], *(f"{op['bound']} {op['ideal_us']:,.0f} µs" for op in ops)]
        for ops in zip(*(phase["ops"] for phase in phases), strict=True)
        if ops[0]["kind"] != "elementwise"
    ]
    return table(f"Operations of {name} on each device", header, rows, id=f"bounds-{name}")


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.2f}"
