"""Slow first requests: by how much they move what the page prints, and what helps against them."""

import re
from dataclasses import replace

import pytest

from burstline.measure.record.columns import columns_of
from burstline.measure.record.manifest import LoadFacts, StageFacts
from burstline.measure.record.tables import record_table
from burstline.wording import time_text
from burstline.workloads.plan import N_BURST_OUTPUT
from tests.measure.making import conditions, ok, percentile, summarized

C, N, SLOW = 4, 400, 20
MOVED = re.compile(r"(?:They move|(\d+) of them are measured: this moves) TTFT (p\d+) from (.+) to (.+)\.$")


def loop(**asked):
    """A closed loop with 20 slow requests behind its first wave; each is sent 8 ms after it was due."""
    rows, free = [], [0.0] * C
    for k in range(N):
        slot = min(range(C), key=free.__getitem__)
        due_s, is_slow = free[slot], C <= k < C + SLOW
        first_s = due_s + 0.008 + (0.150 if is_slow else 0.040 + 0.0005 * (k * 37 % 40))
        row = ok(k, first_s, [0.05])
        due_ns = round(due_s * 1e9)
        rows.append(replace(row, due_ns=due_ns, dispatched_ns=due_ns, sent_ns=due_ns + 8_000_000))
        free[slot] = first_s + 0.05
    given = conditions(concurrency=C, **asked)
    return columns_of(record_table(rows)), given


def told(summary):
    verdict = summary["verdict"]
    return [each for each in (*verdict["reasons"], *verdict["warnings"]) if each["code"] == "cold"]


def test_what_slow_first_requests_move_is_the_percentile_that_the_page_prints():
    c, given = loop()
    summary = summarized(c, given)
    (cold,) = told(summary)
    n_measured, p, without, with_them = MOVED.search(cold["text"]).groups()
    ttft = summary["metrics"]["ttft"]
    assert with_them == time_text(ttft[p]["point"])
    slow = [k for k in range(N) if C <= k < C + SLOW]
    measured = c.due_s[slow] >= summary["window"]["start_s"]["point"]
    assert int(n_measured) == measured.sum() < SLOW
    others = c.where([k not in slow for k in range(N)])
    counted = others.due_s >= summary["window"]["start_s"]["point"]
    waits_s = (others.first_s - others.due_s)[counted]
    assert without == time_text(percentile(waits_s, int(p[1:]) / 100, "s").point)


@pytest.mark.parametrize("warmup", ["auto", 100])
def test_behind_a_warm_up_nobody_is_told_to_warm_up_again(warmup):
    assert "--warmup" in told(summarized(*loop()))[0]["advice"]
    (cold,) = told(summarized(*loop(warmup=warmup)))
    assert "--warmup" not in cold["advice"]
    assert "longer" in cold["advice"]


def test_a_probe_of_a_search_is_not_advised_to_warm_up():
    """Earlier probes have warmed its server up."""
    c, given = loop()
    manifest = replace(given["manifest"], argv=("burstline", "limit", "--concurrency", "4"))
    (cold,) = told(summarized(c, given | {"manifest": manifest}))
    assert cold["text"] == told(summarized(c, given))[0]["text"]
    assert cold["advice"] == "The search leaves a probe's first requests out."


def test_the_medians_of_an_automatic_warm_up_do_not_pass_for_the_loads():
    bursts = [StageFacts(f"warm-up {k}", 8, 8, 0.2) for k in (1, 2)]
    assert (
        f"at most {N_BURST_OUTPUT} output tokens, median E2E 0.2 s"
        in LoadFacts(stages=bursts).warm_up_sentence
    )


def test_a_run_has_one_advice_on_its_warm_up():
    c, given = loop(warmup="auto")
    bursts = tuple(StageFacts(f"warm-up {k}", 8, 8, 0.2 + 0.1 * (k % 2)) for k in range(1, 7))
    manifest = replace(given["manifest"], load=LoadFacts(stages=bursts))
    verdict = summarized(c, given | {"manifest": manifest})["verdict"]
    advice = [each["advice"] for each in (*verdict["reasons"], *verdict["warnings"])]
    assert len([each for each in advice if "warm" in each]) == 1
