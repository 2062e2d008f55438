"""A plan on disk is the plan: every prompt, place in a session and stage comes back."""

from array import array

import numpy as np
import pyarrow as pa
import pytest

from burstline.workloads import plan as plan_module
from burstline.workloads.lengths import Lengths
from burstline.workloads.plan import Plan, Shape, Stage, fingerprint, make_plan
from burstline.workloads.plan_table import PlannedRequests, plan_of_table, plan_tables
from burstline.workloads.prompts import DrawnRequests, vocabulary_from_size
from burstline.workloads.request import Request, RequestKind, Sampling, Turn
from burstline.workloads.spec import Sharing


def plan(n=25):
    shape = Shape(Lengths(3, 30), Lengths(1, 9), sampling=Sampling(0.7, 0.9, 11))
    return make_plan(shape, np.arange(n) * 0.5, vocabulary_from_size(1000), seed=5)


@pytest.mark.parametrize("n_at_once", [7, 25, 1000])
def test_a_plan_comes_back_byte_for_byte(n_at_once):
    before = plan()
    after = plan_of_table(pa.concat_tables(plan_tables(before, n_at_once)))
    assert after == before
    assert fingerprint(after.requests, after.due_ns) == before.sha256
    assert isinstance(after.requests[0].prompt_ids, array)


def test_text_prompts_and_id_prompts_may_stand_side_by_side():
    requests = (Request(0, None, "hello", 2, 3), Request(1, array("I", [4_000_000_000]), None, 1, 3, False))
    before = Plan(requests, array("q", [0, 1]), 0, "x")
    assert plan_of_table(pa.concat_tables(plan_tables(before))) == before


def test_without_prompts_a_request_still_tells_ids_from_text():
    requests = (Request(0, None, "hello", 2, 3), Request(1, array("I", [4]), None, 1, 3))
    table = pa.concat_tables(plan_tables(Plan(requests, array("q", [0, 1]), 0, "x")))
    light = PlannedRequests(table.drop_columns(["prompt_ids"]))
    assert [request.prompt_ids for request in light] == [None, ()]
    assert [request.n_prompt_tok for request in light] == [2, 1]


def test_of_a_long_plan_only_what_is_looked_at_is_made():
    requests = tuple(Request(k, array("I", [k]), None, 1, k + 1) for k in range(3001))
    table = pa.concat_tables(plan_tables(Plan(requests, array("q", range(3001)), 0, "x")))
    light = PlannedRequests(table)
    assert (len(light), light[2500].n_output_tok, light._part.cache_info().currsize) == (3001, 2501, 1)
    assert [request.index for request in light] == list(range(3001))


def test_sessions_chats_documents_and_stages_come_back():
    requests = (
        Request(0, None, None, 9, 3, messages='[{"role":"user","content":"hi"}]', verbatim=True),
        Request(1, array("I", [4, 5]), None, 2, 3, family=7, turn=Turn(0, 0)),
        Request(2, array("I", [6]), None, 6, 3, turn=Turn(0, 1, (1,), 5_000)),
        Request(3, None, "which?", 2, 0, kind=RequestKind.RERANK, documents=("this", "that")),
    )
    warm = Stage("warm-up 1", (Request(4, array("I", [1]), None, 1, 1, stage="warm-up 1"),), array("q", [0]))
    before = Plan(requests, array("q", [0, 0, 0, 1]), 0, "x", (warm,))
    after = plan_of_table(pa.concat_tables(plan_tables(before)))
    assert after == before
    assert [r.index for r in PlannedRequests(pa.concat_tables(plan_tables(before)))] == [
        0,
        1,
        2,
        3,
        4,
    ]


def test_a_large_plan_is_kept_as_what_it_is_drawn_from(monkeypatch):
    monkeypatch.setattr(plan_module, "MOST_IDS", 100)
    monkeypatch.setattr("burstline.workloads.plan_table.MOST_IDS", 100)
    shape = Shape(Lengths(30, 60), Lengths(1, 9), sharing=Sharing(groups=3, hit=0.5))
    before = make_plan(shape, [0.0] * 40, vocabulary_from_size(1000), seed=5)
    table = pa.concat_tables(plan_tables(before, 7))
    assert table.column("prompt_ids").null_count == 40 + len(before.stages[0].requests)
    after = plan_of_table(table)
    assert isinstance(after.requests, DrawnRequests)
    assert after == before
    assert fingerprint(after.requests, after.due_ns) == before.sha256
