"""Intervals of rates cover the true rate, in simulated loops whose truth is known in closed form."""

from __future__ import annotations

import heapq
import re

import numpy as np
import pyarrow as pa
import pytest

from burstline.measure.metrics.steady_state import MOST_COSINES, Steady, steady_part
from burstline.measure.metrics.throughput import Lives, throughputs_in
from burstline.measure.record import tables
from burstline.measure.record.columns import Columns, columns_of
from burstline.measure.stats.estimates import Estimate
from burstline.measure.stats.serial_correlation import ratio_interval
from tests.measure.queueing import queued
from tests.measure.test_closed_loop import loop

TPOT_S, TTFT_S = 0.02, 0.1
TOK = (4, 60)
"""Replies have so many tokens, each length alike."""
RATES = ("requests_per_s", "output_tok_per_s")

LOOPS = [(8, 160), (8, 500), (8, 2000), (64, 1000), (64, 2000), (256, 4000)]
"""Requests at a time, and in all."""


def columns(sent_s: np.ndarray, n_tok: np.ndarray, tpot_s: float = TPOT_S) -> Columns:
    """Successes with the first token after TTFT_S and the others every `tpot_s`."""
    n = len(sent_s)
    token_ns = [
        ((at + TTFT_S + tpot_s * np.arange(k)) * 1e9).astype(np.int64)
        for at, k in zip(sent_s, n_tok, strict=True)
    ]
    sent_ns = (sent_s * 1e9).astype(np.int64)
    last_ns = np.array([times[-1] for times in token_ns])
    values = {
        "index": np.arange(n),
        "outcome": ["ok"] * n,
        **dict.fromkeys(("due_ns", "dispatched_ns", "connected_ns", "sent_ns"), sent_ns),
        "headers_ns": [times[0] for times in token_ns],
        "answer_ns": [times[0] for times in token_ns],
        "closed_ns": last_ns,
        "token_ns": token_ns,
        "token_n": [[1] * k for k in n_tok],
        "read_lag_ns": [[0] * k for k in n_tok],
        "read_error_ns": [[0] * k for k in n_tok],
        **dict.fromkeys(("planned_prompt_tok", "prompt_tok"), [16] * n),
        **dict.fromkeys(("planned_output_tok", "output_tok"), n_tok),
    }
    arrays = [pa.array(values.get(field.name, [None] * n), field.type) for field in tables.RECORDS]
    return columns_of(pa.table(arrays, schema=tables.RECORDS))


def closed(c: int, n: int, random: np.random.Generator) -> Columns:
    """A closed loop of `c` at a server that serves each request as if it were alone."""
    n_tok = random.integers(TOK[0], TOK[1] + 1, n)
    free, sent_s = [0.0] * c, np.zeros(n)
    for k in range(n):
        sent_s[k] = heapq.heappop(free)
        heapq.heappush(free, sent_s[k] + TTFT_S + TPOT_S * (n_tok[k] - 1))
    return columns(sent_s, n_tok)


def covered(of_run, truth: dict[str, float], n_runs: int, **how) -> dict[str, float]:
    """By rate, how often the interval holds the true one; a run too short for an interval has none."""
    hits, printed = dict.fromkeys(RATES, 0), dict.fromkeys(RATES, 0)
    for seed in range(n_runs):
        c = of_run(np.random.default_rng(seed))
        c, lives = c if isinstance(c, tuple) else (c, Lives.of(c))
        steady = steady_part(c, **how, lives=lives)
        if steady is None:
            continue
        kept_full = lives if how.get("concurrency") else None
        rates = throughputs_in(c, steady.window, steady.block_s, kept_full, steady.n_cosines)
        for name in RATES:
            figure = getattr(rates, name)
            if isinstance(figure, Estimate) and figure.level is not None:
                printed[name] += 1
                hits[name] += figure.low <= truth[name] <= figure.high
    assert min(printed.values()) > 0.9 * n_runs
    return {name: hits[name] / printed[name] for name in RATES}


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("c", "n"), LOOPS)
def test_rates_of_closed_loops_cover(c: int, n: int) -> None:
    mean_tok = (TOK[0] + TOK[1]) / 2
    per_s = c / (TTFT_S + TPOT_S * (mean_tok - 1))
    truth = {"requests_per_s": per_s, "output_tok_per_s": per_s * mean_tok}
    found = covered(lambda random: closed(c, n, random), truth, 300, pattern=None, concurrency=c)
    print(f"C = {c}, N = {n}: " + ", ".join(f"{name} {share:.1%}" for name, share in found.items()))
    assert min(found.values()) >= 0.91


TURNS, PAUSE_S = 4, 1.0


def sessions(c: int, n: int, random: np.random.Generator) -> tuple[Columns, Lives]:
    """`c` sessions at a time of TURNS requests each, with exponential pauses between them."""
    n_tok = random.integers(TOK[0], TOK[1] + 1, (n, TURNS))
    free, sent_s = [0.0] * c, np.zeros((n, TURNS))
    for k in range(n):
        at_s = heapq.heappop(free)
        for turn in range(TURNS):
            sent_s[k, turn] = at_s
            at_s += TTFT_S + TPOT_S * (n_tok[k, turn] - 1)
            at_s += random.exponential(PAUSE_S) if turn < TURNS - 1 else 0.0
        heapq.heappush(free, at_s)
    made = columns(sent_s.ravel(), n_tok.ravel())
    return made, Lives.of(made, np.repeat(np.arange(n), TURNS))


def rate_of_sessions(c: int) -> dict[str, float]:
    """In closed form: what a session brings over how long it takes."""
    mean_tok = (TOK[0] + TOK[1]) / 2
    per_s = c * TURNS / (TURNS * (TTFT_S + TPOT_S * (mean_tok - 1)) + (TURNS - 1) * PAUSE_S)
    return {"requests_per_s": per_s, "output_tok_per_s": per_s * mean_tok}


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("c", "n"), [(4, 100), (16, 400), (16, 1000)])
def test_rates_of_closed_loops_of_sessions_cover(c: int, n: int) -> None:
    truth = rate_of_sessions(c)
    found = covered(lambda random: sessions(c, n, random), truth, 300, pattern=None, concurrency=c)
    print(f"{c} sessions at a time of {n}: " + ", ".join(f"{name} {x:.1%}" for name, x in found.items()))
    assert min(found.values()) >= 0.91


def test_sessions_count_while_new_ones_take_the_place_of_those_that_end() -> None:
    """Behind the last opening fewer and fewer run: to count that time made short loops a quarter too slow."""
    points = []
    for seed in range(40):
        c, lives = sessions(8, 40, np.random.default_rng(seed))
        steady = steady_part(c, None, concurrency=8, lives=lives)
        assert steady is not None
        assert steady.counted(c).due_s.max() <= lives.start_s.max()
        rates = throughputs_in(c, steady.window, steady.block_s, lives, steady.n_cosines)
        points.append(rates.requests_per_s.point)
    assert np.mean(points) == pytest.approx(rate_of_sessions(8)["requests_per_s"], rel=0.03)


def test_a_short_loop_of_sessions_says_how_many_sessions_to_run() -> None:
    """Their number sets how long it takes: it cannot be run for so many seconds."""

    def steady_of(n: int) -> Steady:
        c, lives = sessions(3, n, np.random.default_rng(1))
        steady = steady_part(c, None, concurrency=3, lives=lives)
        assert steady is not None
        return steady

    found = re.fullmatch(r"1 run: .*; for an interval pass --sessions (\d+)", steady_of(12).too_short or "")
    assert found is not None
    assert int(found[1]) > 12
    assert steady_of(int(found[1])).n_cosines is not None


@pytest.mark.parametrize(
    ("n", "rate", "tpot_s"), [(60, 2.0, 0.08), (60, 2.0, 1.3), (12, 2.0, 0.08), (300, 7.0, 0.4)]
)
def test_the_rate_of_evenly_spaced_requests_is_that_of_their_gaps(n: int, rate: float, tpot_s: float) -> None:
    """A window that begins between two arrivals would hold a gap more than requests, or one less."""
    c = columns(np.arange(n) / rate, np.full(n, 2), tpot_s)
    steady = steady_part(c, "constant", duration_s=n / rate)
    assert steady is not None
    rates = throughputs_in(c, steady.window, steady.block_s)
    assert rates.requests_per_s.point == pytest.approx(rate)


def test_an_open_loop_of_sessions_lasts_until_the_last_one_begins() -> None:
    """3 a second of 4 turns with 3 s between them: 12 requests a second."""
    begins_s = np.arange(120) / 3
    sent_s = begins_s[:, None] + np.arange(4) * 3.3
    order = np.argsort(sent_s.ravel(), kind="stable")
    c = columns(sent_s.ravel()[order], np.full(480, 11))
    lives = Lives.of(c, np.repeat(np.arange(120), 4)[order])
    steady = steady_part(c, "constant", lives=lives)
    assert steady is not None
    assert steady.window.end_s == pytest.approx(begins_s[-1])
    assert steady.window.start_s == pytest.approx(31 / 3)  # the first that begins 3 * 3.3 + 0.3 s later
    rates = throughputs_in(c, steady.window, steady.block_s)
    assert rates.requests_per_s.point == pytest.approx(12, rel=0.02)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("share", [0.2, 0.5])
def test_rates_of_closed_loops_cover_where_clients_hang_up(share: float) -> None:
    """Who hangs up holds a place for a while and brings nothing."""
    mean_tok, held_s = (TOK[0] + TOK[1]) / 2, TTFT_S + TPOT_S
    stay_s = (1 - share) * (TTFT_S + TPOT_S * (mean_tok - 1)) + share * held_s
    per_s = 16 * (1 - share) / stay_s

    def of_run(random: np.random.Generator) -> tuple[Columns, Lives]:
        n_tok, hung_up = random.integers(TOK[0], TOK[1] + 1, 1000), random.random(1000) < share
        free, sent_s = [0.0] * 16, np.zeros(1000)
        for k in range(1000):
            sent_s[k] = heapq.heappop(free)
            heapq.heappush(free, sent_s[k] + (held_s if hung_up[k] else TTFT_S + TPOT_S * (n_tok[k] - 1)))
        every = columns(sent_s, np.where(hung_up, 2, n_tok))
        return every.where(~hung_up), Lives.of(every)

    truth = {"requests_per_s": per_s, "output_tok_per_s": per_s * mean_tok}
    found = covered(of_run, truth, 300, pattern=None, concurrency=16)
    print(f"{share:.0%} hang up: " + ", ".join(f"{name} {x:.1%}" for name, x in found.items()))
    assert min(found.values()) >= 0.91


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("c", "n"), LOOPS)
def test_rates_of_loops_whose_steps_slow_all_in_flight_cover(c: int, n: int) -> None:
    """As in a batch: neighbours share their steps. The truth is the mean rate of 150 other loops."""
    random = np.random.default_rng(7)

    def one(*, drains: bool) -> tuple[float, np.ndarray]:
        """The rate on the plateau, and the stays of the requests that ended on it, by dispatch."""
        sent_s, ended_s, _ = loop(c, n, 0.0, random, drains=drains)
        begin_s, end_s = np.sort(ended_s)[c - 1], sent_s.max()
        own = np.flatnonzero((ended_s > begin_s) & (ended_s <= end_s))
        own = own[np.argsort(sent_s[own], kind="stable")]
        return len(own) / (end_s - begin_s), (ended_s - sent_s)[own]

    truth = np.mean([one(drains=False)[0] for _ in range(150)])
    hits = 0
    for _ in range(300):
        rate, stays_s = one(drains=True)
        low, high = ratio_interval(np.ones(len(stays_s)), stays_s, MOST_COSINES)
        hits += rate * low <= truth <= rate * high
    print(f"shared steps, C = {c}, N = {n}: {hits / 300:.1%}")
    assert hits >= 0.91 * 300


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("e2e_s", "n"), [((4, 6), 600), ((5, 15), 1000), ((10, 20), 1500)])
def test_rates_of_open_loops_with_long_replies_cover(e2e_s: tuple[int, int], n: int) -> None:
    """10 requests a second, one token each 0.1 s."""
    low, high = (round(each / 0.1) for each in e2e_s)

    def of_run(random: np.random.Generator) -> Columns:
        return columns(np.cumsum(random.exponential(0.1, n)), random.integers(low, high + 1, n), 0.1)

    truth = {"requests_per_s": 10.0, "output_tok_per_s": 10.0 * (low + high) / 2}
    found = covered(of_run, truth, 300, pattern="poisson")
    print(f"E2E {e2e_s}, N = {n}: " + ", ".join(f"{name} {share:.1%}" for name, share in found.items()))
    assert min(found.values()) >= 0.91


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("e2e_s", "n"), [((5, 15), 600), ((15, 25), 600), ((8, 12), 1000)])
def test_a_rate_that_is_held_is_seldom_called_overloaded(e2e_s: tuple[int, int], n: int) -> None:
    """No queue at all, but a load that takes up to a third of the run to fill up."""
    low, high = (round(each / 0.1) for each in e2e_s)
    alarms = 0
    for seed in range(300):
        random = np.random.default_rng(seed)
        c = columns(np.cumsum(random.exponential(0.1, n)), random.integers(low, high + 1, n), 0.1)
        steady = steady_part(c, "poisson")
        alarms += bool(steady and steady.reasons)
    print(f"E2E {e2e_s}, N = {n}: {alarms / 300:.1%} false alarms")
    assert alarms <= 0.02 * 300


@pytest.mark.slow
def test_a_queue_at_1_3_times_the_capacity_is_found() -> None:
    found = 0
    for seed in range(100):
        steady = steady_part(columns_of(queued(1.3, 1000, seed)), "poisson")
        found += bool(steady and any(reason.code == "overloaded" for reason in steady.reasons))
    print(f"1.3 times the capacity: found in {found}%")
    assert found >= 95
