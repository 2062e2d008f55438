"""Drawn loads whose server repeats our key in each event: every figure is as without it, and `verify` holds."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from burstline import cli
from burstline.loadgen.capture.capture import Capture, CaptureWriter, Reads, read_captures
from burstline.measure.record.rundir import open_run
from tests.oracle.draws import draw
from tests.oracle.test_oracle import fired
from tests.secrets_learned import forget
from tests.seeds import SEED

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

N = int(os.environ.get("LAB_MASKED", "3"))
KEY = b"cmpl-truth"
"""The id of a reply, which the server says in each event."""


def unmasked(capture: Capture) -> Capture:
    reads = Reads.of(capture.reads)
    return replace(capture, reads=replace(reads, data=reads.data.replace(b"*" * len(KEY), KEY)))


@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize("k", range(N))
def test_all_figures_are_as_without_the_key(k: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BURSTLINE_API_KEY", KEY.decode())
    monkeypatch.setenv("HF_TOKEN", "choices")  # a name in each event, which has to stay
    run, _, command = fired(draw(SEED + k), tmp_path)
    masked = list(read_captures(run / "captures"))
    said = b"".join(Reads.of(each.reads).data for each in masked)
    assert KEY not in said, command
    assert b'"choices":' in said, command
    assert cli.main(["verify", str(run)]) == 0, command
    monkeypatch.delenv("BURSTLINE_API_KEY")
    forget(monkeypatch)
    bare = shutil.copytree(run, tmp_path / "bare" / run.name)
    shutil.rmtree(bare / "captures")
    spool = CaptureWriter(bare / "captures", 0)
    for each in masked:
        spool.put(lambda each=each: unmasked(each))
    spool.close()
    assert sum(Reads.of(unmasked(each).reads).data.count(KEY) for each in masked) > len(masked), command
    assert cli.main(["report", "--decode", str(bare)]) == 0, command
    assert open_run(bare).record_table.equals(open_run(run).record_table), command
    assert (bare / "summary.json").read_bytes() == (run / "summary.json").read_bytes(), command
