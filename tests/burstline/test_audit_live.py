"""`run --audit` at engines on a CPU: one batched reply in fp32 is as good as one alone."""

from importlib.metadata import version

import pytest

from burstline.cli import main
from burstline.measure.record.rundir import open_run
from burstline.measure.record.summary import SecondReader
from burstline.measure.record.verdict import Replies
from tests.servers.lives import of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.mark.parametrize(
    "engine", [of("reference"), of("vllm"), of("sglang", marks=[pytest.mark.thorough]), of("llamacpp")]
)
def test_a_real_engines_replies_are_those_that_it_gives_alone(engine, lives, tmp_path):
    url = lives(engine).url
    load = "--requests 60 --concurrency 8 --prompt-tokens 64 --output-tokens 24 --audit 50% --no-canary -q"
    argv = ["run", "--engine", engine, "--url", url, *load.split(), "--out", str(tmp_path)]
    assert main(argv) in (0, 4)  # 4: llama.cpp truncates some replies of random weights, which are failures
    (path,) = tmp_path.iterdir()
    audit = open_run(path).summary.audit
    print(audit)
    # A batch rounds otherwise, so a near-tie of random weights may rarely fall the other way.
    assert (
        audit.answer in (Replies.SAME, Replies.AS_ALONE)
        or round(audit.under_load.point * audit.under_load.n) == 1
    )
    assert 25 <= audit.under_load.n <= 30  # llama.cpp truncates some replies of random weights
    assert audit.cut_short.point == 0
    if engine in ("sglang", "llamacpp"):
        assert audit.second_reader is None  # their own dialects, of which the field has no client
    else:
        assert audit.second_reader == SecondReader(f"httpx {version('httpx')}", 30)
