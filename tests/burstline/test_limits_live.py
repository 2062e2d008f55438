"""The embedded engine with each limit made binding in turn: the first line of a run names that one."""

import pytest

from burstline.loadgen.record.rundir import open_run
from burstline.reports.model.comparison import view_of
from burstline.reports.page.answer import limit_of
from tests.burstline.test_run import finished, the_run

pytestmark = pytest.mark.slow

ASKED = ("--engine", "reference", "--prompt-tokens", "256", "--output-tokens", "32")
BINDING = {
    "the batch limit of 8 requests": "--requests 60 --max-num-seqs 8",
    "the token budget of 256 a step": "--requests 60 --max-num-batched-tokens 256",
    "the KV cache": "--requests 60 -- --kv-tokens 3000",
    "the concurrency": "--requests 24 --concurrency 2",
    "the load": "--requests 20 --rate 4",
}


@pytest.mark.parametrize("limit", BINDING)
def test_the_limit_that_binds_is_named(limit, tmp_path):
    finished(tmp_path / "runs", *ASKED, *BINDING[limit].split())
    run = view_of(open_run(the_run(tmp_path / "runs")))
    assert limit_of(run.summary, run.manifest).startswith(f"Limited by {limit}")
