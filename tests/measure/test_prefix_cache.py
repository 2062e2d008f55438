"""Hits that a prefix cache of any size should have: closed forms, a plain LRU, and the stack distances."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from burstline.measure.metrics.prefix_cache import CacheUse, simulate, stack_distances
from burstline.measure.record.manifest import Manifest
from burstline.measure.record.summary import PrefixCache, SessionFigures, Summary
from burstline.measure.record.tables import telemetry_table
from burstline.measure.record.telemetry import Telemetry
from burstline.measure.record.verdict import State, Verdict
from burstline.measure.stats.estimates import Absent, measured
from burstline.measure.verdict.judge import caveats
from burstline.servers.host.telemetry import Row
from burstline.servers.identity import Identity
from burstline.workloads.plan import chain_of

TOK = 4
MANY = 10_000
NO_FALL = Absent("no counter fell")


def alone(prompts):
    """Each prompt a word of letters, a letter a block; each request ends before the next begins."""
    uses = []
    for k, prompt in enumerate(prompts):
        ids = np.repeat([ord(letter) for letter in prompt], TOK).astype(np.int64)
        uses.append(CacheUse(chain_of(ids, TOK), len(ids), k, k + 0.25, k + 0.5))
    return uses


def plain_lru(prompts, n_blocks):
    """The same by a list of prefixes, most recently used first, for requests one after another."""
    recent, hits = [], []
    for prompt in prompts:
        chain = [prompt[: k + 1] for k in range(len(prompt))]
        hits.append(TOK * next((k for k, p in enumerate(chain) if p not in recent or k + 1 == len(chain)), 0))
        recent = (chain + [each for each in recent if each not in chain])[:n_blocks]
    return hits


def test_the_second_of_two_equal_prompts_hits_all_but_its_last_block():
    uses = alone(["abcd", "abcd", "abxx"])
    assert simulate(uses, MANY, TOK, names_early=False) == [0, 3 * TOK, 2 * TOK]
    assert [len(row) for row in stack_distances(uses, TOK)] == [0, 3, 2]


def test_a_prompt_that_does_not_end_with_a_block_hits_all_its_whole_blocks():
    ids = np.arange(4 * TOK + 1)
    uses = [CacheUse(chain_of(ids, TOK), len(ids), k, k + 0.2, k + 0.4) for k in range(2)]
    assert simulate(uses, MANY, TOK, names_early=False) == [0, 4 * TOK]


def test_requests_that_are_computed_together_do_not_serve_each_other():
    chain = chain_of(np.arange(4 * TOK), TOK)
    together = [CacheUse(chain, 4 * TOK, 0.0, 1.0, 2.0 + k) for k in range(3)]
    uses = [*together, CacheUse(chain, 4 * TOK, 1.0, 3.0, 4.0)]
    assert simulate(uses, MANY, TOK, names_early=False) == [0, 0, 0, 12]


def test_blocks_of_a_running_request_are_not_evicted():
    first, other = (chain_of(np.arange(4 * TOK) + start, TOK) for start in (0, 1000))
    crowd = [CacheUse(other, 4 * TOK, 2.0, 3.0, 4.0), CacheUse(first, 4 * TOK, 5.0, 6.0, 7.0)]
    running = CacheUse(first, 4 * TOK, 0.0, 1.0, 9.0)
    ended = CacheUse(first, 4 * TOK, 0.0, 1.0, 1.5)
    assert simulate([running, *crowd], 4, TOK, names_early=False) == [0, 0, 3 * TOK]
    assert simulate([ended, *crowd], 4, TOK, names_early=False) == [0, 0, 0]


def test_a_reply_is_found_by_the_turn_that_follows_it():
    ids = np.arange(10 * TOK)
    first = CacheUse(chain_of(ids[: 5 * TOK - 1], TOK), 2 * TOK, 0.0, 1.0, 2.0, (1.0, 1.3, 1.6))
    following = CacheUse(chain_of(ids, TOK), 10 * TOK, 3.0, 4.0, 5.0)
    assert simulate([first, following], MANY, TOK, names_early=False) == [0, 4 * TOK]


def test_an_engine_that_names_blocks_early_shares_those_of_a_prompt_that_it_computes():
    uses = [CacheUse(chain_of(np.arange(4 * TOK), TOK), 4 * TOK, k / 4, 1.0, 2.0) for k in range(3)]
    assert simulate(uses, MANY, TOK, names_early=False) == [0, 0, 0]
    assert simulate(uses, MANY, TOK, names_early=True) == [0, 3 * TOK, 3 * TOK]


def test_a_reply_that_grows_evicts_what_a_later_prompt_looks_for():
    old, new = (chain_of(np.arange(4 * TOK) + start, TOK) for start in (0, 1000))
    ended = CacheUse(old, 4 * TOK, 0.0, 1.0, 2.0)
    growing = CacheUse(new, TOK, 3.0, 4.0, 9.0, (5.0, 6.0, 7.0))
    for at_s, n_found in ((4.5, 3), (5.5, 3), (6.5, 2), (7.5, 1)):  # the last block goes first
        again = CacheUse(old, 4 * TOK, at_s, at_s + 0.1, at_s + 0.2)
        assert simulate([ended, growing, again], 5, TOK, names_early=False) == [0, 0, n_found * TOK], at_s


def test_without_room_for_a_reply_the_youngest_is_preempted_and_its_blocks_are_evicted():
    old, young = (chain_of(np.arange(4 * TOK) + start, TOK) for start in (0, 1000))
    growing = CacheUse(old, 2 * TOK, 0.0, 1.0, 9.0, (3.0, 4.0))
    preempted = CacheUse(young[:2], 2 * TOK, 1.5, 2.0, 10.0)
    like_it = CacheUse(young[:2], 2 * TOK, 5.0, 6.0, 7.0)
    assert simulate([growing, preempted, like_it], 5, TOK, names_early=False) == [0, 0, TOK]
    assert simulate([growing, preempted, like_it], 4, TOK, names_early=False) == [0, 0, 0]


@settings(max_examples=150, deadline=None)
@given(st.lists(st.text("ab", min_size=1, max_size=5), max_size=12), st.integers(1, 14))
def test_simulation_stack_distances_and_a_plain_lru_agree_at_every_size(prompts, n_blocks):
    # The last block of a prompt that is all cached is computed again: here none is.
    prompts = [f"{prompt}{chr(1000 + k)}" for k, prompt in enumerate(prompts)]
    uses = alone(prompts)
    by_distance = [sum(d <= n_blocks for d in row) * TOK for row in stack_distances(uses, TOK)]
    assert simulate(uses, n_blocks, TOK, names_early=False) == by_distance == plain_lru(prompts, n_blocks)


def codes(*, served_tok, identity=None, restarted_s=NO_FALL, simulated_tok=400.0):
    cache = PrefixCache(
        prompt_tok=at(1000.0),
        infinite_tok=at(500.0),
        simulated_tok=at(simulated_tok),
        replied_tok=at(served_tok),
        restarted_s=restarted_s,
    )
    summary = Summary({"planned": 100, "ok": 100}, {}, Verdict(State.VALID), prefix_cache=cache)
    return [
        reason.code
        for reason in caveats(summary, Manifest(engine="vllm", workload="burst", identity=identity))
    ]


def at(point):
    return measured(point, "tok", "")


def test_what_a_cache_served_against_its_plan_is_named_by_its_cause():
    assert codes(served_tok=405.0) == codes(served_tok=480.0) == []
    assert codes(served_tok=700.0) == ["prefix-more"]
    assert codes(served_tok=200.0) == ["prefix-less"]
    assert codes(served_tok=0.0) == ["prefix-none"]
    assert codes(served_tok=0.0, identity=Identity("vllm", prefix_cache=False)) == ["prefix-off"]
    assert codes(served_tok=200.0, restarted_s=at(2.5)) == ["prefix-restarted"]
    assert codes(served_tok=10.0, simulated_tok=12.0) == [], "a cache too small for the plan is no fault"


@pytest.mark.parametrize(("prefix_cache", "said"), [(False, ["prefix-off"]), (True, []), (None, [])])
def test_sessions_at_a_server_without_a_prefix_cache_are_told_what_it_could_serve(prefix_cache, said):
    """Each turn computes the whole conversation again, which decides how long it takes."""
    sessions = replace(
        SessionFigures.absent(Absent("none")), earlier_fraction=measured(0.571, "1", ""), by_turn=()
    )
    cache = PrefixCache(at(1000.0), Absent("by the turns"), Absent("unknown"), replied_tok=at(0.0))
    summary = Summary(
        {"planned": 60, "ok": 60}, {}, Verdict(State.VALID), prefix_cache=cache, sessions=sessions
    )
    identity = Identity("llamacpp", prefix_cache=prefix_cache)
    told = list(caveats(summary, Manifest(engine="llamacpp", workload="sessions", identity=identity)))
    assert [reason.code for reason in told] == said
    assert all("could serve 57.1% of the prompt tokens" in reason.text for reason in told)


def test_a_counter_that_falls_during_the_load_is_a_restart():
    rows = [(-1.0, 50.0), (1.0, 80.0), (2.0, 10.0), (3.0, 60.0)]
    table = telemetry_table(Row(int(at_s * 1e9), "engine", "prompt_tokens", value) for at_s, value in rows)
    watched = Telemetry.of(table).over(2.5)
    assert watched.restarted("engine", "prompt_tokens").point == 2.0
    assert isinstance(watched.over(1.5).restarted("engine", "prompt_tokens"), Absent)


def test_each_fall_of_servers_that_answer_in_turn_is_counted():
    """R38: the warning tells them from one that started again, by whose fall each of three counters falls."""
    values = (100, 3, 105, 7, 110, 9)
    names = ("prompt_tokens", "generation_tokens")
    rows = [Row(k * 10**9, "engine", name, value) for k, value in enumerate(values) for name in names]
    assert Telemetry.of(telemetry_table(rows)).over(9.0).restarted("engine", *names).n == 6
