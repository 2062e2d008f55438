"""What is fired to certify the instrument: a load in the shape of the one that is planned."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from burstline.bench.load_options import Load, Wish, checked
from burstline.bench.vocabulary import ASSUMED
from servers.truth.script import Script
from workloads.lengths import Lengths
from workloads.plan import Plan, make_plan
from workloads.seeds import rng

EVENTS_PER_S: Final = 20_000
"""As many tokens a second as a fast GPU streams; our truth server sends so many on time."""
GAP_S: Final = 0.01
TTFT_S: Final = 0.2
N_LEAST: Final = 32
DEADLINE_S: Final = 30.0

LADDER_PER_S: Final = (10_000, 20_000, 30_000, 40_000, 60_000, 80_000, 120_000)
N_STREAMS: Final = 100
RUNG_S: Final = 0.4


@dataclass(frozen=True, slots=True)
class Drill:
    """A plan and how the truth server answers it, one script or one per arrival.

    `law` is the rate and burstiness of random gaps between arrivals, None where they follow no such law;
    `notes` say how the drill differs from the load that it stands for.
    """

    load: Load
    plan: Plan
    scripts: tuple[Script, ...]
    law: tuple[float, float] | None = None
    notes: tuple[str, ...] = ()


def drill(load: Load, budget_s: float) -> Drill:
    """As many requests at once, and as often, as the load's own; it lasts about `budget_s`.

    Replies come as from an engine that shares `EVENTS_PER_S` among all requests in flight, none faster than a
    token in 10 ms. What does not fit is cut, and arrivals too slow for it are hastened: made harder, never
    easier.
    """
    due_s = load.arrivals.due_s(rng(load.seed, "arrivals"))
    n, n_in_flight, n_waves = _extent(load, due_s, budget_s)
    ceiling_per_s = load.max_rate_per_s
    hastened = max(
        1.0, float(due_s[n - 1]) / budget_s, n / (ceiling_per_s * budget_s) if ceiling_per_s else 0
    )
    gap_s = max(GAP_S, n_in_flight / EVENTS_PER_S)
    ttft_s = min(TTFT_S, budget_s / n_waves / 2)
    n_most_tok = max(2, int((budget_s / n_waves - ttft_s) / gap_s))
    asked_tok = load.shape.output_tok
    lengths = Lengths(min(asked_tok.low, n_most_tok), min(asked_tok.high, n_most_tok))
    plan = make_plan(
        replace(load.shape, output_tok=lengths), (due_s[:n] / hastened).tolist(), ASSUMED, load.seed
    )
    notes = (
        (n < len(due_s), f"the first {n:,} of {len(due_s):,} requests"),
        (hastened > 1, f"arrivals {hastened:.3g} times as fast"),
        (asked_tok.high > n_most_tok, f"{lengths} of {asked_tok} output tokens"),
    )
    script = Script(ttft_s=ttft_s, gaps_s=(gap_s,))
    law = _law(load, hastened)
    load = replace(load, deadline_s=DEADLINE_S, max_rate_per_s=ceiling_per_s and ceiling_per_s * hastened)
    return Drill(load, plan, (script,), law, tuple(note for so, note in notes if so))


def ladder() -> tuple[Drill, tuple[tuple[float, int], ...]]:
    """One burst of streams that go ever faster together; its rungs as `certificate.limit` wants them."""
    rungs = tuple((float(rate), round(rate * RUNG_S / N_STREAMS)) for rate in LADDER_PER_S)
    gaps_s = [N_STREAMS / rate for rate, n_tok in rungs for _ in range(n_tok)]
    load = checked(Wish(requests=N_STREAMS, prompt_tokens="16", output_tokens=str(len(gaps_s))))
    # Their phases spread evenly: one thread cannot send a hundred events at one instant.
    scripts = tuple(
        Script(ttft_s=TTFT_S + k / N_STREAMS * gaps_s[0], gaps_s=tuple(gaps_s[1:])) for k in range(N_STREAMS)
    )
    return Drill(load, load.plan(ASSUMED), scripts), rungs


def _extent(load: Load, due_s: np.ndarray, budget_s: float) -> tuple[int, int, int]:
    """How many requests are fired, how many of them are in flight at once, and in how many waves."""
    n = len(due_s)
    if load.concurrency is not None:
        n = min(n, max(2 * load.concurrency, N_LEAST))
        n_in_flight = min(load.concurrency, n)
        return n, n_in_flight, -(-n // n_in_flight)
    n_within = int(np.searchsorted(due_s, budget_s, side="right"))
    n = max(n_within, min(N_LEAST, n))
    # Seconds of arrivals are answered in as many more: about half of them are open at a time.
    return n, n if due_s[n - 1] == 0 else n // 2, 1


def _law(load: Load, hastened: float) -> tuple[float, float] | None:
    wanted = load.arrivals
    if wanted.pattern not in ("poisson", "gamma") or wanted.rate_per_s is None or load.concurrency:
        return None
    return wanted.rate_per_s * hastened, wanted.burstiness or 1.0
