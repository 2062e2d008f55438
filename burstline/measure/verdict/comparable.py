"""Comparability: engines are compared only if they did the same work under the same settings.

Tolerances are stated here and shown with every comparison. Where the work differs the headline is withheld.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from burstline.measure.metrics.prefix_cache import prefix_cache
from burstline.measure.metrics.sessions import turns_of
from burstline.measure.record.columns import Columns, Floats
from burstline.measure.record.manifest import Manifest, ServerFacts
from burstline.measure.record.record import STOPPED, Outcome, in_words
from burstline.measure.record.rundir import Run
from burstline.measure.record.verdict import DECIDES, Reason, State, Use, state_of, withheld, worst
from burstline.measure.stats.figure import known
from burstline.servers.identity import Identity
from burstline.servers.introspection import value_of
from burstline.servers.settings import EQUAL, canonical
from burstline.workloads.options import flag_of
from burstline.workloads.request import Request

TOLERANCE: Final = 0.01
"""Served tokens may differ by 1% (a token that a server adds in front is 0.2% of 512), shares of requests
and of prompt tokens by one point."""

UNUSABLE: Final = tuple(state for state in State if Use.RANKED not in DECIDES[state])
"""States of a run that spoil all of its numbers, worst first."""

COMPARABLE: Final = "COMPARABLE"
ALONE: Final = "NOTHING TO COMPARE"
NOT_STATED: Final = "not stated"

ENDED = (Outcome.OK, Outcome.SHORT, Outcome.CLAMPED, Outcome.LONG)
"""The server gave a whole reply, of whatever length: work that was done."""

OPEN = "open loop"

CACHE_FAULTS = ("prefix-cache", "prefix-more", "prefix-less", "prefix-none", "prefix-restarted")
"""Codes of the warnings of a prefix cache whose hits the plan does not explain."""

OF_LOAD = frozenset(
    {"workload", "sampling", "prompt-tokens", "output-tokens", "finish-reasons", "prefix-cache"}
)
"""Codes of the differences that another load explains."""

_QUANTIZATION_FLAGS = ("-q", "--quantization", "--quantize", "--quant_type")


@dataclass(frozen=True, slots=True, eq=False)
class ServedWork:
    """One run of one contender; `label` names the contender, repeats share it.

    `cached_fraction` is the share of prompt tokens that the prefix cache served, `cache_warnings` are the
    run's about hits that its plan does not explain. In `settings` None means that the server does not say.
    `lengths_forced` is False where the engine cannot ignore an end-of-text token. `verdict` is the state that
    keeps the run from being ranked, else its own, with all `reasons`. `opens` says of sessions which requests
    open one. `columns` are the `planned` requests without those that the load did not need.
    """

    label: str
    planned: Columns
    columns: Columns
    verdict: str
    cached_fraction: float | None
    settings: Mapping[str, str | None]
    cache_warnings: tuple[Reason, ...] = ()
    lengths_forced: bool = True
    reasons: tuple[Reason, ...] = ()
    seed: int | None = None
    opens: NDArray[np.bool_] | None = None

    @property
    def planned_s(self) -> Floats:
        """When requests were due by the plan: of a session its first turn alone, no plan knows the others."""
        return self.planned.due_s if self.opens is None else self.planned.due_s[self.opens]

    @property
    def opened(self) -> bool:
        """Whether requests were due by a schedule, not when another one ended."""
        return self.settings.get("concurrency", OPEN) == OPEN

    @property
    def ended(self) -> NDArray[np.bool_]:
        return self.columns.having("outcome", ENDED)

    def mean(self, column: str) -> float | None:
        values: Floats = getattr(self.columns, column)[self.ended]
        return float(np.nanmean(values)) if np.isfinite(values).any() else None

    @property
    def failed_fraction(self) -> float:
        """The share of planned requests without a whole reply."""
        return float(1 - self.ended.mean()) if len(self.columns) else 0.0

    @property
    def stopped_fraction(self) -> float | None:
        """The share of whole replies that the model ended by itself."""
        reasons = [r for r in self.columns.table.column("finish_reason").to_pylist() if r is not None]
        return sum(reason in STOPPED for reason in reasons) / len(reasons) if reasons else None

    @property
    def failures(self) -> str:
        """The outcomes of what failed, most frequent first, e.g. `300 got HTTP 503`."""
        tally = self.columns.tally("outcome")
        return in_words({outcome: n for outcome, n in tally.items() if outcome not in ENDED})


def work_of(run: Run, label: str) -> ServedWork:
    manifest = run.manifest
    planned, salt = run.columns.without(Outcome.ABANDONED), manifest.asked.salt
    columns = planned.without(Outcome.NOT_SENT) if manifest.may_end_early else planned
    requests = run.asked if salt else run.plan.requests
    server = manifest.server or ServerFacts()
    identity = manifest.identity or Identity(manifest.engine)
    caching = identity.prefix_cache is not False
    verdict = run.summary.verdict if run.summary else None
    turns, cache = turns_of(run), prefix_cache(columns, manifest, run.watched.over(columns.end_s), ())
    served_tok, total_tok = (known(cache.served_tok), known(cache.prompt_tok)) if cache else (None, None)
    cached_fraction = served_tok / total_tok if served_tok is not None and total_tok else None
    config = manifest.hardware.model_config if manifest.hardware else None
    return ServedWork(
        label=label,
        planned=planned,
        columns=columns,
        verdict=str(withheld(verdict, Use.RANKED) or verdict.state) if verdict else "NO SUMMARY",
        reasons=verdict.reasons if verdict else (),
        cached_fraction=cached_fraction if caching else 0.0,
        cache_warnings=tuple(w for w in (verdict.warnings if verdict else ()) if w.code in CACHE_FAULTS),
        settings={
            "concurrency": str(manifest.asked.concurrency or OPEN),
            "abandoned": _abandoned(manifest),
            **settings_of(identity, server.argv, requests, config),
        },
        seed=manifest.asked.seed,
        opens=turns.opens if turns else None,
        lengths_forced=manifest.asked.ends == "forced"
        and (server.capabilities is None or server.capabilities.forced_output_length),
    )


def settings_of(
    identity: Identity,
    argv: Sequence[str] | None,
    requests: Sequence[Request],
    config: Mapping[str, object] | None = None,
) -> dict[str, str | None]:
    """Sampling, precision and batch limits by name; None where unknown."""
    read = {name: getattr(identity, name) for name in EQUAL}
    return {
        "sampling": _sampling(requests),
        **{
            name: f"{value:,}" if isinstance(value, int) else canonical(name, value)
            for name, value in read.items()
        },
        "quantization": quantization_of(identity, argv, config),
    }


def quantization_of(
    identity: Identity, argv: Sequence[str] | None, config: Mapping[str, object] | None = None
) -> str | None:
    """How the weights are quantised: as the server says, else its command line, else the model's config.json.

    "none" where a known command line and the config.json are silent, None where no source is known.
    """
    stated = identity.quantization or (value_of(argv, *_QUANTIZATION_FLAGS) if argv else None)
    of_model = (config or {}).get("quantization_config")
    if stated is None and isinstance(of_model, Mapping) and of_model.get("quant_method"):
        stated = str(of_model["quant_method"])
    if stated is None and argv is not None:
        stated = "none"
    return canonical("quantization", stated)


def _abandoned(manifest: Manifest) -> str:
    """Which share of its requests the load abandons, and after how many tokens."""
    hang_ups = manifest.asked.cancel_share
    return "none" if hang_ups is None else f"{hang_ups.share:.1%} after {hang_ups.after} tokens"


def _sampling(requests: Sequence[Request]) -> str:
    """Without its seed: engines draw differently from the same one."""
    kinds = {(r.sampling.temperature, r.sampling.top_p) for r in requests}
    return "; ".join(f"temperature {t:g}, top_p {p:g}" if t else "greedy" for t, p in sorted(kinds))


@dataclass(frozen=True, slots=True)
class Fact:
    """One thing the gate looked at: what each contender has, and whether they agree (None: not known of all).

    `values` are texts by contender; repeats that differ are shown as a range.
    """

    name: str
    values: Mapping[str, str]
    agrees: bool | None
    tolerance: str


@dataclass(frozen=True, slots=True)
class Comparability:
    """`state` is COMPARABLE, NOT-COMPARABLE, the worst verdict of a run that cannot be believed, or ALONE.

    `reasons` are why it is not COMPARABLE, `warnings` what could not be checked or must be known.
    """

    state: str
    reasons: tuple[Reason, ...]
    warnings: tuple[Reason, ...]
    facts: tuple[Fact, ...]

    @property
    def comparable(self) -> bool:
        return self.state == COMPARABLE


def comparability(
    works: Sequence[ServedWork],
    unlike: Sequence[Reason] = (),
    *,
    varied: Collection[str] = (),
    anyway: bool = False,
) -> Comparability:
    """The gate over all runs of all contenders; `unlike` are differences from elsewhere.

    `varied` are settings that differ on purpose, or the "workload". With `anyway` differences and disturbed
    runs are warnings.
    """
    both = _needed_by_all(works)
    numbers = [_judge_number(number, both if number.relative else works) for number in _NUMBERS]
    listed = [s for s in _SETTINGS if s.usual is None or any(s.of(work) != s.usual for work in works)]
    settings = [_judge_setting(setting, works) for setting in listed if setting.key not in varied]
    facts = tuple(fact for fact, _ in [*numbers, *settings])
    differing = [reason for _, reason in [*numbers, *settings] if reason is not None]
    cached = {work.label: work.cache_warnings[0] for work in reversed(works) if work.cache_warnings}
    truths = (Reason("cache-truth", f"{label}: {each.text}", each.advice) for label, each in cached.items())
    reasons = (*unlike, *_workload(works), *differing, *truths)
    loads = [reason for reason in unlike if "workload" in varied and reason.code in OF_LOAD]
    if "workload" in varied:
        reasons = tuple(reason for reason in reasons if reason.code not in OF_LOAD)
    free = dict.fromkeys(work.label for work in works if not work.lengths_forced)
    unforced = (Reason.of("unforced", label=name) for name in free)
    warnings = (*loads, *_unbelievable(works, (State.CLIENT_BOUND,)), *_unchecked(facts), *unforced)
    # A difference in failures says already why a run is FAILED.
    is_said = any(reason.code == "failures" for reason in differing)
    unbelievable = _unbelievable(works, UNUSABLE[1:] if is_said else UNUSABLE)
    if anyway:
        warnings = (*reasons, *unbelievable, *warnings)
        reasons = unbelievable = ()
    if reasons:
        return Comparability(State.NOT_COMPARABLE, (*reasons, *unbelievable), warnings, facts)
    if unbelievable:
        state = str(worst(w.verdict for w in works if state_of(w.verdict) in UNUSABLE))
        return Comparability(state, unbelievable, warnings, facts)
    alone = len({work.label for work in works}) < 2
    return Comparability(ALONE if alone else COMPARABLE, (), warnings, facts)


@dataclass(frozen=True, slots=True)
class _Number:
    """A number that must agree, absolutely or as a share of the largest; `reason` says that it does not."""

    reason: str
    name: str
    of: Callable[[ServedWork], float | None]
    shown: str
    relative: bool = False


_NUMBERS: Final = (
    _Number("prompt-tokens", "Prompt tokens served, mean", lambda w: w.mean("prompt_tok"), "{:,.1f}", True),
    _Number("output-tokens", "Output tokens served, mean", lambda w: w.mean("output_tok"), "{:,.1f}", True),
    _Number("finish-reasons", "Replies that the model ended itself", lambda w: w.stopped_fraction, "{:.1%}"),
    _Number("failures.differ", "Requests without a complete reply", lambda w: w.failed_fraction, "{:.1%}"),
    _Number(
        "prefix-cache.differ", "Prompt tokens from the prefix cache", lambda w: w.cached_fraction, "{:.1%}"
    ),
)


@dataclass(frozen=True, slots=True)
class _Setting:
    """A setting that must be equal. One that all have at its `usual` value is not listed."""

    key: str
    code: str
    name: str
    advice: str
    usual: str | None = None

    def of(self, work: ServedWork) -> str | None:
        return work.settings.get(self.key, self.usual)


_OF_FILE: Final = dict.fromkeys(("dtype", "quantization"), "; a GGUF file has its own")
_SETTINGS: Final = (
    _Setting("concurrency", "workload", "Concurrency", "Send every engine the same load."),
    _Setting("abandoned", "workload", "Requests abandoned", "Give all the same --cancel-share.", "none"),
    _Setting("sampling", "sampling", "Sampling", "Use the same sampling for every engine."),
    *(
        _Setting(
            name, code, title, f"Start every engine with the same {flag_of(name)}{_OF_FILE.get(name, '')}."
        )
        for name, (code, title) in EQUAL.items()
    ),
)


def _judge_number(number: _Number, works: Sequence[ServedWork]) -> tuple[Fact, Reason | None]:
    found = [(work.label, number.of(work)) for work in works]
    known = [(label, value) for label, value in found if value is not None]
    shown = _shown(found, number.shown)
    tolerance = f"{TOLERANCE:.0%}" if number.relative else f"{TOLERANCE * 100:.0f} percentage point"
    if not known:
        return Fact(number.name, shown, None, tolerance), None
    (low_label, low), (high_label, high) = (pick(known, key=lambda item: item[1]) for pick in (min, max))
    allowed = TOLERANCE * (high if number.relative else 1.0)
    if high - low <= allowed + 1e-12:
        return Fact(number.name, shown, True if len(known) == len(found) else None, tolerance), None
    ends = f"{number.shown.format(low)} at {low_label}, {number.shown.format(high)} at {high_label}"
    by_contender = [
        f"{work.label}: {int((~work.ended).sum()):,} of {len(work.columns):,} requests, {work.failures}"
        for work in works
        if work.failures
    ]
    detail = f" ({'; '.join(by_contender)})" if number.reason == "failures.differ" else ""
    what = f"{number.name}: {ends}{detail}. To be ranked, these must lie within {tolerance} of each other."
    return Fact(number.name, shown, False, tolerance), Reason.of(number.reason, what=what)


def _needed_by_all(works: Sequence[ServedWork]) -> Sequence[ServedWork]:
    """The works with the requests that all of them sent: a faster server needs more of a plan."""
    size = len(works[0].planned)
    if any(len(work.planned) != size for work in works) or all(len(work.columns) == size for work in works):
        return works
    sent = ~np.any([work.planned.having("outcome", [Outcome.NOT_SENT]) for work in works], axis=0)
    return [replace(work, columns=work.planned.where(sent)) for work in works]


def _judge_setting(setting: _Setting, works: Sequence[ServedWork]) -> tuple[Fact, Reason | None]:
    found = [(work.label, setting.of(work)) for work in works]
    shown = _shown(found, "{}")
    values = {value for _, value in found if value is not None}
    if len(values) > 1:
        stated = ", ".join(f"{value} at {label}" for label, value in shown.items() if value != NOT_STATED)
        reason = Reason(setting.code, f"{setting.name}: {stated}.", setting.advice)
        return Fact(setting.name, shown, False, "equal"), reason
    return Fact(setting.name, shown, None if any(v is None for _, v in found) else True, "equal"), None


def _shown(found: Sequence[tuple[str, float | str | None]], shape: str) -> dict[str, str]:
    """Each contender's value, as text; the extremes if its repeats differ."""
    texts: dict[str, str] = {}
    for label in dict.fromkeys(label for label, _ in found):
        values = [value for name, value in found if name == label and value is not None]
        distinct = list(dict.fromkeys(shape.format(v) for v in sorted(values)))
        texts[label] = " to ".join(distinct[:: max(len(distinct) - 1, 1)]) or NOT_STATED
    return texts


def _workload(works: Sequence[ServedWork]) -> list[Reason]:
    """The same requests at the same times; what they say may differ, how long they are may not."""
    one, first = works[0], works[0].planned
    for work in works[1:]:
        c = work.planned
        if len(c) == len(first) and work.seed != one.seed and _alike(work, one):
            continue  # another seed draws other lengths and times from the same laws
        if len(c) != len(first):
            what = f"{len(first):,} requests were planned for {one.label}, {len(c):,} for {work.label}"
        elif not np.array_equal(c.planned_prompt_tok, first.planned_prompt_tok) or not np.array_equal(
            c.planned_output_tok, first.planned_output_tok
        ):
            what = f"{one.label} and {work.label} got requests of different lengths"
        elif one.opened and work.opened and not np.allclose(work.planned_s, one.planned_s, atol=1e-3):
            what = f"{one.label} and {work.label} got requests at different times"
        else:
            continue
        return [Reason.of("workload", what=what)]
    return []


def _alike(one: ServedWork, other: ServedWork) -> bool:
    """Whether two loads of different seeds agree in their means, to within what their sizes allow."""
    a, b = one.planned, other.planned
    pairs = (
        (a.planned_prompt_tok.mean(), b.planned_prompt_tok.mean()),
        (a.planned_output_tok.mean(), b.planned_output_tok.mean()),
        (float(np.ptp(one.planned_s)), float(np.ptp(other.planned_s))),
    )
    allowed = 4 / np.sqrt(len(a))
    return all(abs(x - y) <= allowed * max(x, y, 1e-9) for x, y in pairs)


def _unchecked(facts: Sequence[Fact]) -> list[Reason]:
    """Settings that an engine does not report: one sentence per contender."""
    silent: dict[str, list[str]] = {}
    for fact in facts:
        if fact.agrees is None:
            for label in (label for label, value in fact.values.items() if value == NOT_STATED):
                silent.setdefault(label, []).append(fact.name[:1].lower() + fact.name[1:])
    return [Reason.of("unchecked", label=label, names=", ".join(names)) for label, names in silent.items()]


def _unbelievable(works: Sequence[ServedWork], states: Sequence[State]) -> tuple[Reason, ...]:
    """One reason for each of the `states` that a run has, with all that spoilt the first such run."""
    reasons = []
    for state in states:
        runs = [work for work in works if state_of(work.verdict) == state]
        if runs:
            who = list(dict.fromkeys(work.label for work in runs))
            many = f"{len(runs)} of {len(works)} runs {'is' if len(runs) == 1 else 'are'} {state}"
            many = f"{many} ({', '.join(who)})"
            own = runs[0].reasons
            which = f"The first{f' ({runs[0].label})' * (len(who) > 1)}: " if len(runs) > 1 and own else ""
            state_text = f"The run is {state}" if len(works) == 1 else many
            text = f"{state_text}. {which}{' '.join(reason.text for reason in own)}".rstrip()
            reasons.append(Reason("verdict", text, own[0].advice if own else ""))
    return tuple(reasons)
