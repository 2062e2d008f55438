"""Steps read off the wire, against a server whose steps are known."""

from collections import deque

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from burstline.roofline.reconcile.inputs import Streamed, steps_seen

BUDGET = 256


def served(asked, max_seqs=8, jitter=0.0, seed=0):
    """What the clients of a small batching server saw, and the steps it took: (seconds, new tokens, context).

    `asked` are (sent, prompt, output). A step takes 5 ms, and 20 us a token; tokens arrive up to `jitter` of
    a step later.
    """
    rng = np.random.default_rng(seed)
    waiting, running, steps, now = deque(range(len(asked))), [], [], 0.0
    done, tokens = [0] * len(asked), [[] for _ in asked]
    while waiting or running:
        if not running and asked[waiting[0]][0] > now:
            now = asked[waiting[0]][0]
        budget, work = BUDGET, []
        while len(running) < max_seqs and waiting and asked[waiting[0]][0] <= now:
            running.append(waiting.popleft())
        for i in running:
            n = min(1 if tokens[i] else asked[i][1] - done[i], budget)
            if n:
                work.append((i, n))
                budget -= n
        seconds = 5e-3 + 20e-6 * (BUDGET - budget)
        now += seconds
        steps.append((seconds, sorted((n, done[i] + n) for i, n in work)))
        for i, n in work:
            done[i] += n
            if done[i] >= asked[i][1]:
                tokens[i].append(now + rng.uniform(0, jitter) * 5e-3)
        running = [i for i in running if len(tokens[i]) < asked[i][2]]
    replies = [
        Streamed(sent_s, prompt, np.array(at)) for (sent_s, prompt, _), at in zip(asked, tokens, strict=True)
    ]
    return replies, steps


def shape(step):
    return sorted(zip(step.new_tok.tolist(), step.context_tok.tolist(), strict=True))


def test_a_single_request_is_a_prefill_and_a_step_for_each_further_token():
    replies, steps = served([(0.0, 100, 5)])
    found = steps_seen(replies, BUDGET)
    assert [shape(seen.step) for seen in found] == [work for _, work in steps]
    assert [seen.seconds for seen in found] == pytest.approx([seconds for seconds, _ in steps])


def test_a_burst_in_waves_gives_every_step_as_it_was():
    replies, steps = served([(0.0, 64, 12)] * 30)
    found = steps_seen(replies, BUDGET)
    assert len(found) == len(steps)
    assert [seen.seconds for seen in found] == pytest.approx([seconds for seconds, _ in steps])
    decodes = [[pair for pair in work if pair[0] == 1] for _, work in steps]
    assert [[pair for pair in shape(seen.step) if pair[0] == 1] for seen in found] == decodes


def test_a_long_prompt_beside_decodes_is_laid_into_the_steps_that_had_room():
    replies, steps = served([(0.0, 16, 40), (0.030, 1000, 4)])
    found = steps_seen(replies, BUDGET)
    most = [max(n for n, _ in work) for _, work in steps]
    seen = [int(one.step.new_tok.max()) for one in found]
    assert sorted(n for n in seen if n > 1) == sorted(n for n in most if n > 1)
    assert sum(one.step.n_logits for one in found) == 44


def test_an_idle_engine_is_no_step():
    replies, steps = served([(0.0, 32, 3), (5.0, 32, 3)])
    found = steps_seen(replies, BUDGET)
    assert sum(seen.seconds for seen in found) == pytest.approx(sum(seconds for seconds, _ in steps))


def test_tokens_of_the_prefix_cache_are_not_computed():
    found = steps_seen([Streamed(0.0, 100, np.array([0.1, 0.2]), cached_tok=64)], BUDGET)
    assert shape(found[0].step) == [(36, 100)]


def test_nothing_is_seen_of_requests_that_got_nothing():
    assert steps_seen([Streamed(0.0, 10, np.array([]))], BUDGET) == []


requests = st.lists(
    st.tuples(st.floats(0, 1), st.integers(2, 600), st.integers(1, 30)), min_size=1, max_size=20
)


@settings(max_examples=25, deadline=None)
@given(asked=requests, jitter=st.floats(0, 0.3), seed=st.integers(0, 9))
def test_no_work_is_lost_or_made_up_however_tokens_are_delayed(asked, jitter, seed):
    replies, steps = served(sorted(asked), jitter=jitter, seed=seed)
    found = steps_seen(replies, BUDGET)
    assert sum(seen.step.n_tok for seen in found) == sum(n for _, work in steps for n, _ in work)
    assert sum(seen.step.n_logits for seen in found) == sum(n_output for *_, n_output in asked)
    assert all((seen.step.context_tok >= seen.step.new_tok).all() for seen in found)
    took_s = max(reply.token_s[-1] for reply in replies) - min(reply.sent_s for reply in replies)
    assert sum(seen.seconds for seen in found) <= took_s + 1e-9
