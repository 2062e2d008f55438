"""The model against measured data; the whole table is `python -m research`."""

import argparse
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from burstline import exit_codes
from burstline.roofline.device.calibration import stack_host
from burstline.roofline.predict.simulate import FrontEnd
from research import __main__ as accuracy
from research import serving_points
from research.accuracy import _ceilings, _classes, kernel_checks
from research.accuracy_serving import _cells, _replay, serving_checks
from research.check import Check, errors, within
from research.serving_points import out_of_sample_hosts, predicted_ms, read_points

DATA = Path(__file__).parents[1] / "data"
POINTS = DATA / "serving" / "aic_silicon_e2e_llama31_8b_agg.csv"


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("checks", [kernel_checks, serving_checks])
def test_no_goal_is_missed_but_those_that_say_why(checks):
    found = list(checks(DATA))
    assert found
    assert not [f"{c.goal} {c.what}: {c.out_of_sample}" for c in found if c.met is False and not c.known]


def test_a_real_run_of_vllm_is_replayed_within_its_goals():
    own, others = _replay(DATA)
    assert own.met, own
    assert others.met, others


def test_no_measured_row_beats_its_ceiling_without_a_reason():
    check = _ceilings(DATA / "measured")
    assert check.met, check


def test_bound_classes_agree_with_measured_slopes():
    assert _classes(DATA / "measured").met


def test_one_launch_constant_serves_both_devices_of_the_published_cells():
    assert all(check.met for check in _cells())


def test_every_twentieth_serving_point_is_predicted_with_the_other_halfs_constants():
    points = [p for p in read_points(POINTS) if p.device == "h100-sxm5-80g"][::20]
    hosts = out_of_sample_hosts(points)
    assert {host.engine for host in hosts} == {"default-set-on-h200"}
    ratio = np.array([predicted_ms(p, host)[1] / p.tpot_ms for p, host in zip(points, hosts, strict=True)])
    assert within(ratio, 9), errors(ratio)


def test_prompts_that_a_load_tool_repeats_are_computed_by_vllm_once():
    points = [p for p in read_points(POINTS) if p.backend == "vllm" and p.output_tok == 100]
    few, many = min(points, key=lambda p: p.streams), max(points, key=lambda p: p.streams)
    asked = [serving_points._asked(p, computed=False) for p in (few, many)]
    assert sum(not each.cached_tok for each in asked[0]) == 100 - 2 * few.streams
    assert len(asked[0]) == 10 * few.streams
    assert all(each.cached_tok for each in asked[1])
    (host,) = out_of_sample_hosts([many])
    cached, computed = (
        predicted_ms(many, host, FrontEnd(), computed=each)[1] / many.tpot_ms for each in (False, True)
    )
    assert abs(cached - 1) < 0.2 < 1 < computed


@pytest.mark.slow
def test_an_engine_that_schedules_after_each_step_has_a_host_of_its_own():
    points = [p for p in read_points(POINTS) if p.backend == "vllm" and p.output_tok < 1000]
    hosts = out_of_sample_hosts(points)
    assert {host.engine for host in hosts} == {"synchronous-set-on-h100"}
    own, others = (
        np.median(
            [abs(predicted_ms(p, host)[1] / p.tpot_ms - 1) for p, host in zip(points, each, strict=True)]
        )
        for each in (hosts, [stack_host()] * len(points))
    )
    assert own < 0.12 < 0.2 < others


def test_a_point_of_several_pools_or_more_gpus_than_a_server_has_is_left_out(tmp_path):
    header, row = POINTS.read_text("utf-8").splitlines()[:2]
    columns = header.split(",")
    for name, value, kept in (("tp_size", "2.0", 1), ("tp_size", "16.0", 0), ("attention_dp_size", "4.0", 0)):
        cells = row.split(",")
        cells[columns.index(name)] = value
        path = tmp_path / "points.csv"
        path.write_text("\n".join([header, ",".join(cells)]), "utf-8")
        assert len(read_points(path)) == kept, (name, value)


def test_a_load_that_draws_lengths_is_predicted_with_drawn_ones():
    point = replace(read_points(POINTS)[0], scripted=False, prompt_tok=1000, output_tok=500)
    asked = serving_points._asked(point, computed=False)
    prompts, outputs = ({getattr(each, name) for each in asked} for name in ("prompt_tok", "output_tok"))
    assert 800 <= min(prompts) < 850
    assert 950 < max(prompts) <= 1000
    assert 400 <= min(outputs) < 425
    assert 475 < max(outputs) <= 500


def test_a_request_of_eight_waits_for_a_whole_other_one_at_tensorrt_llm():
    points = [p for p in read_points(POINTS) if p.backend == "trtllm" and p.streams == 8][::6]
    hosts = out_of_sample_hosts(points)
    errors_of = [
        np.median(
            [
                abs(predicted_ms(p, host, n_lost=n)[0] / p.ttft_ms - 1)
                for p, host in zip(points, hosts, strict=True)
            ]
        )
        for n in (0, 1, 2)
    ]
    assert errors_of[1] < 0.15
    assert min(errors_of[0], errors_of[2]) > 0.35


def test_a_points_precision_is_what_the_file_states():
    by_group = {point.group: point.quant for point in read_points(POINTS)}
    assert by_group == {
        "h100-sxm5-80g trtllm": "bf16",
        "h200-sxm-141g sglang": "fp8-block",
        "h200-sxm-141g vllm": "fp8-static-kv8",
    }


@pytest.mark.parametrize(
    ("known", "strict", "code"),
    [
        ("", False, exit_codes.TARGET_MISSED),
        ("why", False, exit_codes.DONE),
        ("why", True, exit_codes.TARGET_MISSED),
    ],
)
def test_a_missed_goal_is_marked_and_fails_unless_it_is_known(monkeypatch, capsys, known, strict, code):
    checks = [
        Check("G1", "one", "5", "data", "1.0", "2.0", "peer 3", met=True),
        Check("G2", "two", "5", "data", "1.0", "9.0", met=False, known=known),
    ]
    monkeypatch.setattr(accuracy, "_checks", lambda *_: iter(checks))
    parser = argparse.ArgumentParser()
    accuracy.add_arguments(parser)
    assert accuracy.run(parser.parse_args(["--strict"] if strict else [])) == code
    text = capsys.readouterr().out
    assert "In sample" in text
    assert "Out of sample" in text
    assert "MISSED" in next(line for line in text.splitlines() if line.startswith("G2"))


def test_the_shipped_host_is_what_the_fit_to_all_points_gives():
    assert stack_host().step_s == pytest.approx(3e-4)
    assert stack_host().token_s == pytest.approx(2e-5)
