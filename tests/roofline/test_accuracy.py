"""The model against measured data; the whole table is `burstline accuracy`."""

from pathlib import Path

import pytest

from roofline.validate.accuracy import kernel_checks
from roofline.validate.accuracy_serving import serving_checks

DATA = Path(__file__).parents[1] / "data"


@pytest.mark.slow
@pytest.mark.parametrize("checks", [kernel_checks, serving_checks])
def test_every_gate_holds(checks):
    found = list(checks(DATA))
    assert found
    assert not [f"{check.goal} {check.what}: {check.reached}" for check in found if check.passed is False]


def test_a_real_run_of_vllm_is_replayed_within_its_goals():
    from roofline.validate.accuracy_serving import _replay

    found = list(_replay(DATA / "serving" / "rtx4090_replay" / "requests.jsonl"))
    assert len(found) == 3
    assert all(check.passed for check in found), found


def test_no_measured_row_beats_its_ceiling_without_a_reason():
    from roofline.validate.accuracy import _ceilings

    check = _ceilings(DATA / "measured")
    assert check.passed, check
    assert "2 explained" in check.reached


def test_bound_classes_agree_with_measured_slopes():
    from roofline.validate.accuracy import _classes

    assert _classes(DATA / "measured").passed
