"""The load's flags, checked before anything is started."""

import pytest

from burstline.load import Wish, checked
from servers.engine import Identity
from workloads.request import WorkloadError


def test_the_classic_burst_is_what_no_flag_asks_for():
    load = checked(Wish())
    assert load.title == "1,000 requests of 512 → 64 tokens, all at once"
    assert load.name == "burst-1000x512-64"
    assert load.n_at_once == 1000


def test_a_rate_alone_means_a_constant_one():
    assert checked(Wish(rate=10, duration_s=3)).title == "30 requests of 512 → 64 tokens, constant at 10/s"


def test_a_closed_loop_needs_no_more_connections_than_its_concurrency():
    load = checked(Wish(requests=100, concurrency=8))
    assert load.n_at_once == 8
    assert load.title.endswith("8 at a time")


@pytest.mark.parametrize(
    ("wish", "words"),
    [
        (Wish(requests=0), "--requests 0"),
        (Wish(prompt_tokens="none"), "--prompt-tokens none"),
        (Wish(output_tokens="0"), "--output-tokens 0"),
        (Wish(deadline_s=0), "--deadline-s 0"),
        (Wish(salt="xyz"), "--salt 'xyz'"),
        (Wish(workers=0), "--workers 0"),
        (Wish(concurrency=0), "--concurrency 0"),
        (Wish(max_rate=5), "--concurrency"),
        (Wish(concurrency=4, max_rate=0), "--max-rate 0"),
        (Wish(concurrency=4, arrival="poisson"), "--arrival poisson"),
        (Wish(arrival="sometimes"), "burst, constant"),
        (Wish(arrival="poisson"), "--rate"),
    ],
)
def test_a_silly_wish_is_refused_with_the_flag_that_made_it(wish, words):
    with pytest.raises(WorkloadError, match=words):
        checked(wish)


def test_a_request_beyond_the_models_limit_says_the_limit():
    load = checked(Wish(prompt_tokens="4000", output_tokens="200"))
    load.check_fits(Identity("x", max_model_len=4200))
    with pytest.raises(WorkloadError, match="4199"):
        load.check_fits(Identity("x", max_model_len=4199))
