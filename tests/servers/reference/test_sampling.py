"""The sampler draws what softmax, temperature and top-p say."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from burstline.servers.reference.engine import choose, draw
from burstline.servers.reference.scheduler import Sequence
from burstline.workloads.prompts import rng
from burstline.workloads.request import Sampling

LOGITS = np.log(np.array([0.05, 0.4, 0.1, 0.25, 0.2], np.float32))


def expected(temperature: float, top_p: float) -> np.ndarray:
    p = np.exp(LOGITS.astype(float) / temperature)
    p /= p.sum()
    for i in np.argsort(p)[
        : -1 if top_p < 1 else 0
    ]:  # least likely first: drop what the others reach without
        if p[p > p[i]].sum() >= top_p:
            p[i] = 0
    return p / p.sum()


@pytest.mark.parametrize(
    ("temperature", "top_p"), [(1.0, 1.0), (0.5, 1.0), (2.0, 1.0), (1.0, 0.7), (0.7, 0.9), (1.0, 0.01)]
)
def test_the_draws_follow_the_distribution(temperature: float, top_p: float) -> None:
    u = rng(0, "sampler test").random(20_000)
    counts = np.bincount([draw(LOGITS, temperature, top_p, x) for x in u], minlength=5)
    p = expected(temperature, top_p)
    assert counts[p == 0].sum() == 0
    if (p > 0).sum() > 1:
        assert stats.chisquare(counts[p > 0], 20_000 * p[p > 0]).pvalue > 1e-4


@given(
    logits=st.lists(st.floats(-50, 50, width=32), min_size=1, max_size=20),
    temperature=st.floats(0.01, 10),
    top_p=st.floats(0.001, 1),
    u=st.floats(0, 1, exclude_max=True),
)
def test_a_draw_is_always_an_id(logits: list[float], temperature: float, top_p: float, u: float) -> None:
    assert 0 <= draw(np.array(logits, np.float32), temperature, top_p, u) < len(logits)


def test_a_row_is_greedy_or_sampled_on_its_own() -> None:
    greedy = Sequence([1], 1)
    sampled = [Sequence([1], 1, sampling=Sampling(5.0), rng=rng(i, "request")) for i in range(40)]
    chosen = choose(np.tile(LOGITS, (41, 1)), [greedy, *sampled])
    assert chosen[0] == 1
    assert set(chosen[1:]) == {0, 1, 2, 3, 4}


def test_the_same_seed_draws_the_same_ids() -> None:
    def ids(seed: int) -> list[int]:
        sequence = Sequence([1], 50, sampling=Sampling(1.0), rng=rng(seed, "request"))
        return [choose(LOGITS[None].copy(), [sequence])[0] for _ in range(50)]

    assert ids(3) == ids(3) != ids(4)
