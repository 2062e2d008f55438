"""Comparing a setting at the embedded engine: two sets of three runs, and one with a hidden change."""

import re
from pathlib import Path

import pytest

from burstline.measure.record.rundir import open_run
from burstline.reports.model.contenders import comparison_of
from tests.burstline.inside import burstline
from tests.truth.rig import truth_server
from tests.truth.script import Script
from tests.verdicts import done

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
LOAD = [
    "--requests",
    "48",
    "--prompt-tokens",
    "32",
    "--output-tokens",
    "16",
    "-q",
]


def runs_with(out: Path, *flags: str, repeats: int = 3) -> list[Path]:
    again = ("--repeats", repeats) if repeats > 1 else ()
    code, said = burstline("run", "--engine", "reference", *again, *LOAD, "--out", out, "--", *flags)
    paths = sorted(path for path in out.iterdir() if not path.name.endswith("-repeats"))
    assert len(paths) == repeats, said
    assert done(code, out), said
    return paths


def test_engines_of_different_speed_are_compared_in_loops_by_time(tmp_path):
    """The faster one needs more of the plan: what the slower one never sent has not failed."""
    loop = [
        "--duration-s",
        "4",
        "--concurrency",
        "8",
        "--prompt-tokens",
        "8",
        "--output-tokens",
        "4..20",
        "-q",
    ]
    for name, ttft_s in (("fast", 0.05), ("slow", 0.1)):
        with truth_server(Script(ttft_s=ttft_s, gaps_s=(ttft_s / 10,))) as server:
            again = ("--url", server.url, "--engine", "truth", "--repeats", "3", "--out", tmp_path / name)
            code, said = burstline("run", *again, *loop)
        assert done(code, tmp_path / name), said
    runs = [path for path in tmp_path.glob("*/*") if not path.name.endswith("-repeats")]
    comparison = comparison_of([open_run(path) for path in runs], tmp_path, anyway=True)
    (case,) = comparison.cases
    assert not [
        each
        for each in case.gate.reasons + case.gate.warnings
        if each.code in ("failures", "workload", "output-tokens")
    ]
    for contender in case.contenders:
        own = [view.summary.metrics["e2e"].p50.point for view in contender.views]
        assert min(own) <= contender.figure("metrics", "e2e", "p50").point <= max(own)


@pytest.mark.measures
def test_a_setting_is_ranked_recognised_and_refused_beside_a_hidden_second_difference(tmp_path):
    few = runs_with(tmp_path / "few", "--max-num-seqs", "4")
    many = runs_with(tmp_path / "many", "--max-num-seqs", "48")
    other = runs_with(tmp_path / "other", "--max-num-seqs", "48", "--block-size", "32", repeats=1)
    # Tests share their machine: what only other work disturbed is compared all the same.
    states = {str(open_run(path).summary.verdict.state) for path in (*few, *many)}
    anyway = ("--anyway",) if states - {"VALID"} else ()
    code, said = burstline("compare", *few, *many, "--vary", "max-num-seqs", *anyway)
    assert code == 0, said
    assert "reference max-num-seqs 4 vs 48: " in said
    assert re.search(r"^48 is \S+x faster than 4 ", said, re.MULTILINE)
    code, said = burstline("compare", *few, *many, *anyway)
    assert code == 0, said
    assert said.startswith("reference max-num-seqs 4 vs 48: "), "named without --vary"
    code, said = burstline("compare", *few, *other, "--vary", "max-num-seqs")
    assert code == 4, said
    assert "The block-size differs" in said
    assert "--vary block-size" in said
