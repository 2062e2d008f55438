"""The work that a run did and its settings, which decide whether runs can be compared."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from burstline.measure.metrics.prefix_cache import prefix_cache
from burstline.measure.metrics.sessions import turns_of
from burstline.measure.record.columns import Columns, Floats
from burstline.measure.record.manifest import Manifest, ServerFacts
from burstline.measure.record.record import STOPPED, Outcome, in_words
from burstline.measure.record.rundir import Run
from burstline.measure.record.verdict import Reason, Use, withheld
from burstline.measure.stats.figure import known
from burstline.servers.identity import Identity
from burstline.servers.introspection import value_of
from burstline.servers.settings import EQUAL, canonical
from burstline.workloads.request import Request

ENDED = (Outcome.OK, Outcome.SHORT, Outcome.CLAMPED, Outcome.LONG)
"""The server gave a whole reply, of whatever length: work that was done."""

OPEN = "open loop"

CACHE_FAULTS = ("prefix-cache", "prefix-more", "prefix-less", "prefix-none", "prefix-restarted")
"""Codes of the warnings of a prefix cache whose hits the plan does not explain."""

_QUANTIZATION_FLAGS = ("-q", "--quantization", "--quantize", "--quant_type")


@dataclass(frozen=True, slots=True, eq=False)
class ServedWork:
    """One run of one contender; `label` names the contender, repeats share it.

    `cached_fraction` is the share of prompt tokens that the prefix cache served, `cache_warnings` are the
    run's about hits that its plan does not explain. In `settings` None means that the server does not say.
    `lengths_forced` is False where the engine cannot ignore an end-of-text token. `verdict` is the state that
    keeps the run from being ranked, else its own; `verdict_reason` has all reasons, "" without any. `opens`
    says of sessions which requests open one. `columns` are the `planned` requests without those that the load
    did not need.
    """

    label: str
    run: str
    planned: Columns
    columns: Columns
    verdict: str
    cached_fraction: float | None
    settings: Mapping[str, str | None]
    cache_warnings: tuple[Reason, ...] = ()
    lengths_forced: bool = True
    verdict_reason: str = ""
    verdict_advice: str = ""
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

    @property
    def prompt_tok(self) -> float | None:
        return _mean(self.columns.prompt_tok[self.ended])

    @property
    def output_tok(self) -> float | None:
        return _mean(self.columns.output_tok[self.ended])

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
        run=run.name,
        planned=planned,
        columns=columns,
        verdict=str(withheld(verdict, Use.RANKED) or verdict.state) if verdict else "NO SUMMARY",
        verdict_reason=" ".join(reason.text for reason in verdict.reasons) if verdict else "",
        verdict_advice=next((reason.advice for reason in verdict.reasons), "") if verdict else "",
        cached_fraction=cached_fraction if caching else 0.0,
        cache_warnings=tuple(
            warning for warning in (verdict.warnings if verdict else ()) if warning.code in CACHE_FAULTS
        ),
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
    words = ("greedy" if not t else f"temperature {t:g}, top_p {p:g}" for t, p in sorted(kinds))
    return "; ".join(words)


def _mean(values: Floats) -> float | None:
    known = values[~np.isnan(values)]
    return float(known.mean()) if len(known) else None
