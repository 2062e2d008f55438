"""`burstline study` as a user calls it."""

import argparse
import json
from xml.etree import ElementTree

import pytest

from burstline.verbs import study


def call(*argv: str) -> int:
    parser = argparse.ArgumentParser()
    study.add_arguments(parser)
    return study.run(parser.parse_args(argv))


def test_it_prints_three_analyses(capsys):
    assert call("--device", "a100", "h100") == 0
    text = capsys.readouterr().out
    assert [line[:2] for line in text.splitlines() if line[:1].isdigit()] == ["1.", "2.", "2.", "3."]
    gate_up = next(line for line in text.splitlines() if line.startswith("prefill  gate_up"))
    assert gate_up.split()[-2:] == ["compute", "memory"]
    assert "HBM4" in text


@pytest.mark.drawn
def test_json_and_figures_hold_the_same_numbers(capsys, tmp_path):
    assert call("--json", "--figures", str(tmp_path / "figures"), "--output", "1") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["limits"]["prefill"]["down"]["h100-sxm5-80g"] == "memory"
    assert "decode" not in found["limits"]
    assert [point["technology"] for point in found["dram"]["8"]][-1] == "HBM4"
    for name in ("dram", "generations"):
        path = tmp_path / "figures" / f"{name}.svg"
        assert ElementTree.parse(path).getroot().tag.endswith("svg")
