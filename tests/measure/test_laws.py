"""Laws that figures obey whatever a server did: each is seen to be broken by figures that break it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from burstline.measure.metrics.accounting import broken_laws
from burstline.measure.record.columns import Columns, columns_of
from burstline.measure.record.summary import Summary
from burstline.measure.record.verdict import State
from burstline.measure.stats.estimates import Estimate
from burstline.measure.summarize import summarize
from tests.measure.making import conditions
from tests.measure.queueing import queued, table


def summary_of_a_rate() -> tuple[Summary, Columns]:
    """400 requests at 20 a second, half of what the queue's servers can take."""
    records = queued(0.5, 400, seed=1)
    columns = columns_of(records)
    return summarize(columns, **conditions(arrivals=("poisson", 20.0))), columns


def changed(summary: Summary, section: str, name: str, factor: float) -> Summary:
    part = getattr(summary, section)
    figure = getattr(part, name)
    assert isinstance(figure, Estimate)
    return replace(
        summary, **{section: replace(part, **{name: replace(figure, point=factor * figure.point)})}
    )


def test_the_figures_of_a_run_agree_with_each_other() -> None:
    summary, columns = summary_of_a_rate()
    assert broken_laws(summary, columns, None) == ()
    assert summary.verdict.state == State.VALID


@pytest.mark.parametrize(
    ("section", "name", "factor", "said"),
    [
        ("throughput", "requests_per_s", 0.8, "By Little's law"),
        ("throughput", "requests_per_s", 3, "arrived in total"),
        ("throughput", "output_tok_per_s", 3, "arrived in total"),
        ("concurrency", "mean", 1.2, "By Little's law"),
        ("concurrency", "max", 0.01, "never more than"),
    ],
)
def test_a_figure_that_is_wrong_breaks_a_law(section: str, name: str, factor: float, said: str) -> None:
    summary, columns = summary_of_a_rate()
    (first, *_) = broken_laws(changed(summary, section, name, factor), columns, None)
    assert first.code == "contradiction"
    assert said in first.text


def test_a_reply_that_was_read_with_its_request_breaks_no_law() -> None:
    """A client that loses its CPU in a send finds the whole reply there: the request stays 0 s."""
    due_s, stay_s = np.arange(18) / 100, np.full(18, 0.02)
    stay_s[0] = 0.0
    columns = columns_of(table(due_s, due_s + stay_s / 2, due_s + stay_s, 3))
    assert columns.last_s[0] == columns.sent_s[0]
    assert broken_laws(summarize(columns, **conditions()), columns, None) == ()


def test_a_percentile_below_a_lower_one_and_a_lost_outcome_break_laws() -> None:
    summary, columns = summary_of_a_rate()
    ttft = summary.metrics["ttft"]
    assert isinstance(ttft.p50, Estimate)
    swapped: dict[str, Any] = dict(summary.metrics)
    swapped["ttft"] = replace(ttft, p50=replace(ttft.p50, point=9.0))
    told = " ".join(reason.text for reason in broken_laws(replace(summary, metrics=swapped), columns, None))
    assert "TTFT p50 is 9" in told
    fewer = dict(summary.counts) | {"ok": summary.counts["ok"] - 1}
    (lost,) = broken_laws(replace(summary, counts=fewer), columns, None)
    assert "399 requests have an outcome, and 400 were planned" in lost.text


def test_more_in_flight_than_a_closed_loop_may_have_breaks_a_law() -> None:
    summary, columns = summary_of_a_rate()
    assert "in a closed loop of 1" in broken_laws(summary, columns, 1)[0].text
