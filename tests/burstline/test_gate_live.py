"""`burstline gate` at the embedded engine: a batch limit is told, and a setting is the same as itself."""

import json
from pathlib import Path

import pytest

from tests.burstline.inside import burstline

pytestmark = [pytest.mark.timeout(1200), pytest.mark.usefixtures("without_page")]
LOAD = ("--requests", "60", "--prompt-tokens", "64", "--output-tokens", "16")
MANY, FEW = (f"run --engine reference --max-num-seqs {n}" for n in (32, 4))


def gate(out: Path, *words: str) -> tuple[int, dict[str, object]]:
    """Tests share their machine, so disturbed runs count: they come in turn."""
    code, said = burstline("gate", *words, "--anyway", "--out", out, "--", *LOAD)
    assert code in (0, 3, 4), said
    print(said)
    return code, json.loads((out / "gate-001" / "gate.json").read_text())


@pytest.mark.bench  # beside a busy neighbour eight runs are too few
def test_4_against_32_requests_in_a_batch_is_told_within_8_runs(tmp_path):
    code, found = gate(tmp_path, MANY, FEW, "--max-runs", "8")
    assert (code, found["outcome"]) == (3, "WORSE")
    assert found["n"] <= 4


@pytest.mark.slow
@pytest.mark.measures
@pytest.mark.parametrize("trial", [0, pytest.param(1, marks=pytest.mark.thorough)])
def test_the_same_setting_twice_is_never_called_different(tmp_path, trial):
    code, found = gate(tmp_path, MANY, MANY, "--max-runs", "8")
    assert code in (0, 4), found["sentence"]  # 4: undecided
