"""Different, the same or inconclusive: how often each answer comes for systems whose difference is known."""

import math

import numpy as np
import pytest

from burstline.measure.stats.estimates import Absent
from burstline.measure.stats.significance import Answer, Contrast, Difference, between_runs, holm, judged

N_NUMBERS = 6
SLACK = 67
"""Of 1,000 pairs 50 may be called different at 5 %; 67 is what chance alone exceeds once in a hundred."""


def runs(k, random, *, ratio=1.0, noise=0.02):
    """Six numbers of each of k runs that differ from run to run, and mostly together."""
    shared, own = random.normal(size=(k, 1)), random.normal(size=(k, N_NUMBERS))
    return ratio * np.exp(noise * (math.sqrt(0.7) * shared + math.sqrt(0.3) * own))


def against(a, b, **how):
    return judged({str(i): between_runs(a[:, i], b[:, i], **how) for i in range(a.shape[1])})


def share(answer, contrasts):
    found = [each.answer for each in contrasts]
    return found.count(answer) / len(found)


def simulated(k, ratio, noise, n_pairs, *, drift=0.0, interleaved=False, k_b=None):
    """All contrasts of each of `n_pairs` simulated comparisons."""
    random = np.random.default_rng(17)
    found = []
    for _ in range(n_pairs):
        a, b = runs(k, random, noise=noise), runs(k_b or k, random, ratio=ratio, noise=noise)
        heat = np.exp(drift * np.arange(max(k, k_b or k)))[:, None]
        contrasts = against(a * heat[:k], b * heat[: k_b or k], interleaved=interleaved)
        found.append(list(contrasts.values()))
    return found


def n_false_alarms(found):
    return sum(any(each.answer == Answer.DIFFERENT for each in contrasts) for contrasts in found)


def flat(found):
    return [each for contrasts in found for each in contrasts]


def test_a_tenth_more_is_different_where_runs_agree_to_a_hundredth():
    random = np.random.default_rng(0)
    found = against(runs(5, random, noise=0.01), runs(5, random, ratio=1.1, noise=0.01))["0"]
    assert found.answer == Answer.DIFFERENT
    assert 1.05 < found.ratio.low < 1.1 < found.ratio.high < 1.15
    assert found.more_runs is None
    assert found.detectable < 0.05


def test_equal_systems_whose_runs_agree_are_the_same_within_three_percent():
    random = np.random.default_rng(1)
    found = against(runs(5, random, noise=0.005), runs(5, random, noise=0.005)).values()
    assert {each.answer for each in found} == {Answer.SAME}


def test_a_difference_of_one_percent_is_the_same_however_sure_it_is():
    a = np.array([1.0, 1.0001, 0.9999])
    found = judged({"x": between_runs(a, 1.01 * a)})["x"]
    assert found.p < 0.001
    assert found.answer == Answer.SAME


def test_where_runs_scatter_it_is_inconclusive_and_it_says_what_would_be_found_and_how_many_runs_would_tell():
    found = judged({"x": between_runs(np.array([1.0, 1.1, 0.9]), np.array([1.1, 1.25, 1.0]))})["x"]
    assert found.answer == Answer.INCONCLUSIVE
    assert found.detectable > 0.3
    assert found.more_runs > 3
    assert found.noise > 0.3


def test_as_many_runs_as_were_said_to_tell_do_tell_four_times_out_of_five():
    first = Difference(math.log(1.1), 0.06 * math.sqrt(2 / 3), 4, 0.06, (3, 3), "")
    (contrast,) = judged({"x": first}).values()
    assert contrast.more_runs is not None
    k, random, told = 3 + contrast.more_runs, np.random.default_rng(3), 0
    for _ in range(300):
        a, b = np.exp(0.06 * random.normal(size=(2, k))) * [[1.0], [1.1]]
        told += judged({"x": between_runs(a, b)})["x"].answer == Answer.DIFFERENT
    assert 0.72 <= told / 300 <= 0.90


@pytest.mark.parametrize(("n_a", "n_b"), [(1, 1), (1, 2), (2, 1)])
def test_too_few_runs_say_nothing_of_how_runs_scatter(n_a, n_b):
    found = between_runs(np.ones(n_a), np.ones(n_b))
    assert (found.error, found.p) == (None, 1.0)


@pytest.mark.parametrize(("n_a", "n_b", "freedom"), [(3, 1, 2), (2, 2, 2), (4, 2, 4)])
def test_a_side_with_fewer_than_three_runs_borrows_the_others_scatter(n_a, n_b, freedom):
    found = between_runs(np.linspace(1, 1.1, n_a), np.linspace(1, 1.1, n_b) if n_b > 1 else np.ones(1))
    assert found.freedom == freedom
    assert "assumed to scatter equally" in found.note


def test_pairing_takes_out_what_drifts_for_both():
    heat = np.exp(0.1 * np.arange(6))
    noise = np.exp(0.005 * np.random.default_rng(4).normal(size=(2, 6)))
    alone = between_runs(heat * noise[0], 1.05 * heat * noise[1])
    paired = between_runs(heat * noise[0], 1.05 * heat * noise[1], interleaved=True)
    assert paired.error < alone.error / 5
    assert paired.freedom == 5


def test_readings_that_never_vary_differ_or_are_the_same():
    a = np.full(3, 7.0)
    assert judged({"x": between_runs(a, 2 * a)})["x"].answer == Answer.DIFFERENT
    assert judged({"x": between_runs(a, a)})["x"].answer == Answer.SAME


@pytest.mark.parametrize("k", [3, 6])
def test_two_runs_of_one_system_exceed_the_noise_floor_once_in_twenty(k):
    random, exceeded = np.random.default_rng(3), 0
    for _ in range(500):
        scattered = np.exp(0.05 * random.normal(size=(2, k)))
        floor = judged({"x": between_runs(*scattered)})["x"].noise
        assert floor is not None
        a, b = np.exp(0.05 * random.normal(size=2))
        exceeded += max(a / b, b / a) - 1 > floor
    assert exceeded / 500 == pytest.approx(0.05, abs=0.03)


def test_values_of_zero_have_no_ratio():
    assert isinstance(between_runs(np.array([0.0, 1, 1]), np.ones(3)), Absent)


# ---- one run each


def single(ratio):
    return judged({"x": between_runs(np.array([1.0]), np.array([ratio]))})["x"]


@pytest.mark.parametrize("ratio", [1.0, 1.3, 5.0])
def test_one_run_each_is_never_different_nor_the_same_without_known_noise(ratio):
    found = single(ratio)
    assert found.answer == Answer.INCONCLUSIVE
    assert found.ratio.point == pytest.approx(ratio)
    assert (found.ratio.low, found.detectable, found.more_runs) == (None, None, 2)


def test_one_run_each_has_no_error_at_all():
    try:
        found = between_runs(np.array([1.0]), np.array([5.0]))
    except ZeroDivisionError:
        raise AssertionError("it looked for a scatter where there is none") from None
    assert found.error is None


def test_readings_without_any_scatter_have_no_interval_of_no_width():
    found = judged({"x": between_runs(np.full(3, 7.0), np.full(3, 7.0))})["x"]
    assert (found.answer, found.ratio.low) == (Answer.SAME, None)


# ---- several numbers


def test_holm_by_hand():
    assert [p for p, _ in holm([0.01, 0.04, 0.03])] == pytest.approx([0.03, 0.06, 0.06])
    assert [p for p, _ in holm([0.6, 0.9])] == [1.0, 1.0]
    assert [level for _, level in holm([0.01, 0.04, 0.03])] == pytest.approx([1 - 0.05 / 3, 0.975, 0.975])


def test_what_is_absent_is_no_test_and_costs_the_others_nothing():
    a, b = np.array([1.0, 1.01, 0.99]), np.array([1.1, 1.11, 1.09])
    alone = judged({"x": between_runs(a, b)})["x"]
    beside = judged({"x": between_runs(a, b), "y": Absent("why")})
    assert isinstance(alone, Contrast)
    assert beside["x"] == alone
    assert beside["y"] == Absent("why")


# ---- by simulation


def test_equal_systems_are_rarely_called_different():
    assert n_false_alarms(simulated(3, 1.0, 0.03, 60)) <= 8


@pytest.mark.slow
@pytest.mark.parametrize(
    ("k", "noise", "how"),
    [
        (3, 0.02, {}),
        (5, 0.05, {}),
        (5, 0.05, {"interleaved": True}),
        (5, 0.03, {"interleaved": True, "drift": 0.02}),
        (5, 0.03, {"drift": 0.02}),
        (3, 0.03, {"k_b": 1}),
        (3, 0.03, {"k_b": 6}),
    ],
)
def test_of_1000_pairs_of_equal_systems_at_most_67_are_called_different_in_any_number(k, noise, how):
    alarms = n_false_alarms(simulated(k, 1.0, noise, 1000, **how))
    print(f"{k} runs of {noise:.0%} noise, {how}: {alarms} of 1,000 pairs")
    assert alarms <= SLACK


@pytest.mark.slow
@pytest.mark.parametrize(
    ("k", "noise", "least"), [(3, 0.01, 0.95), (5, 0.02, 0.95), (5, 0.03, 0.7), (8, 0.05, 0.6)]
)
def test_a_tenth_more_is_found(k, noise, least):
    power = share(Answer.DIFFERENT, flat(simulated(k, 1.1, noise, 300)))
    print(f"{k} runs of {noise:.0%} noise: 10 % found in {power:.0%}")
    assert power >= least


@pytest.mark.slow
def test_same_is_said_of_equal_systems_with_enough_runs_and_rarely_of_those_that_differ_by_the_margin():
    equal, apart = (flat(simulated(5, ratio, 0.01, 500)) for ratio in (1.0, 1.03))
    print(
        f"same: {share(Answer.SAME, equal):.0%} of equal ones, {share(Answer.SAME, apart):.1%} at the margin"
    )
    assert share(Answer.SAME, equal) >= 0.9
    assert share(Answer.SAME, apart) <= 0.06


@pytest.mark.parametrize("seed", range(20))
def test_an_interval_excludes_no_difference_just_where_the_answer_is_different(seed):
    random = np.random.default_rng(seed)
    for each in against(runs(4, random), runs(4, random, ratio=1.08, noise=0.04)).values():
        excludes = not each.ratio.low <= 1 <= each.ratio.high
        assert each.answer == Answer.SAME or excludes == (each.answer == Answer.DIFFERENT)


def test_an_interval_names_its_own_level_and_that_of_the_same_lies_within_the_margin():
    """What Holm tests at 0.05 / 8 has an interval of 99.4%, and no "same" stands beside [0.93, 1.08]."""
    differences = {str(k): Difference(0.2, 0.07, 8.0, 0.1, (5, 5), "") for k in range(7)}
    differences["same"] = Difference(0.0, 0.015, 8.0, 0.02, (5, 5), "")
    found = judged(differences)
    assert found["0"].ratio.level == pytest.approx(1 - 0.05 / 8)
    same = found["same"]
    assert (same.answer, same.ratio.level) == (Answer.SAME, pytest.approx(0.9))
    assert 1 / 1.03 < same.ratio.low < same.ratio.high < 1.03
