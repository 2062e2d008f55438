"""The embedded engine with each limit made binding in turn: the first line of a run names that one."""

import re

import pytest

from burstline.measure.record.rundir import open_run
from burstline.reports.model.comparison import view_of
from burstline.reports.page.bottleneck import limit_of
from tests.burstline.inside import ran
from tests.burstline.test_run import the_run

pytestmark = [pytest.mark.slow, pytest.mark.measures, pytest.mark.usefixtures("without_page")]

ASKED = ("--engine", "reference", "--prompt-tokens", "256", "--output-tokens", "32")
# Long enough on a fast machine: the server's gauges are read once a second, and two readings must lie in it.
BINDING = {
    "Limited by the batch limit of 8 requests": "--requests 120 --max-num-seqs 8",
    "Limited by the budget of 256 tokens a step": "--requests 240 --max-num-batched-tokens 256",
    "Limited by the KV cache": "--requests 120 -- --kv-tokens 3000",
    "The server had room for all requests at once, so": "--requests 100 --concurrency 2",
    "Limited (only )?by the load": "--requests 20 --rate 4",
}


@pytest.mark.parametrize("limit", BINDING)
def test_the_limit_that_binds_is_named(limit, tmp_path):
    ran(tmp_path / "runs", *ASKED, *BINDING[limit].split())
    run = view_of(open_run(the_run(tmp_path / "runs")))
    assert re.match(limit, limit_of(run.summary, run.manifest))
