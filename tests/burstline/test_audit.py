"""`run --audit`: replies under load, beside those to the same requests alone."""

import json
from dataclasses import replace

import pytest

from burstline.bench.report import write_report
from burstline.cli import main
from burstline.loadgen.record.decode import generated_by
from burstline.loadgen.record.rundir import AUDIT, RunDir, open_run
from burstline.loadgen.record.verdict import Replies
from burstline.servers.registry import ENGINES
from tests.truth.rig import truth_server
from tests.truth.router import TruthSetup
from tests.truth.script import Script
from tests.verdicts import done

N = 300
FAST = Script(ttft_s=0.001, gaps_s=(0.0,))


def audited(out, setup: TruthSetup, *argv: str, engine: str = "truth", n: int = N):
    """A run of `n` requests, 30 at a time, all of which are audited, at a server that plays this."""
    load = f"--requests {n} --concurrency 30 --prompt-tokens 16 --output-tokens 8 --audit 100%"
    with truth_server(setup=replace(setup, scripts=(FAST,)), thread=True) as truth:
        where = ["--engine", engine, "--url", truth.url, "--vocab-size", "32000"]
        assert done(main(["run", *where, *load.split(), *argv, "--no-canary", "--out", str(out)]), out)
        n_served = len(truth.log())
    (path,) = out.iterdir()
    return open_run(path), n_served


@pytest.mark.slow
def test_a_token_swapped_in_one_of_a_hundred_replies_under_load_alone_is_caught(tmp_path, capsys):
    run, n_served = audited(tmp_path, TruthSetup(swaps_in_batch=0.01))
    audit, said = run.summary.audit, capsys.readouterr()
    captured = generated_by(run.path / "captures", ENGINES["truth"].generated, range(N))
    n_swapped = sum(ids[3] != 3 for ids in captured.values())
    assert audit.answer == Replies.MORE
    assert round(audit.under_load.point * N) == n_swapped > 0
    assert (audit.alone.point, audit.cut_short.point) == (0, 0)
    assert audit.excess.low > 0
    assert (audit.first_difference_p50.point, audit.first_difference_p50.unit) == (3, "tokens")
    assert "replies-differ" in {reason.code for reason in run.summary.verdict.warnings}
    assert f"at most {N} of its requests are sent again, alone and twice: {2 * N} in all" in said.err
    assert f"Audit: {n_swapped} of {N} replies differ" in " ".join(said.out.split())
    assert n_served >= 3 * N
    # No figure counts what was sent again, and the page comes from the run's files alone.
    assert len(run.records) == run.summary.counts["ok"] == N
    page = run.path.joinpath("report.html").read_bytes()
    write_report(RunDir(run.path))
    assert run.path.joinpath("report.html").read_bytes() == page


@pytest.mark.usefixtures("without_page")
@pytest.mark.parametrize(
    ("setup", "answer"),
    [
        pytest.param(
            TruthSetup(swaps_in_batch=0.3, swaps_alone=0.3), Replies.AS_ALONE, marks=pytest.mark.slow
        ),
        (TruthSetup(swaps_in_batch=0.5, swaps_alone=0.05), Replies.MORE),
    ],
)
def test_an_engine_is_blamed_only_for_what_it_does_not_do_alone(tmp_path, setup, answer):
    audit = audited(tmp_path, setup, "-q", n=100)[0].summary.audit
    assert audit.answer == answer
    assert (audit.excess.low <= 0 <= audit.excess.high) == (answer != Replies.MORE)


@pytest.mark.slow
@pytest.mark.usefixtures("without_page")
def test_texts_are_compared_where_no_ids_come(tmp_path):
    setup = TruthSetup(swaps_in_batch=0.1)
    audit = audited(tmp_path, setup, "-q", engine="openai", n=60)[0].summary.audit
    assert audit.answer == Replies.MORE
    assert (audit.first_difference_p50.point, audit.first_difference_p50.unit) == (
        len(" tok" * 3) + 1,
        "characters",
    )


@pytest.mark.slow
@pytest.mark.usefixtures("without_page")
def test_only_the_first_turns_of_sessions_are_audited(tmp_path):
    load = "--sessions 6 --turns 3 --prompt-tokens 16 --output-tokens 8 --audit 1 --no-canary -q"
    with truth_server(FAST, thread=True) as truth:
        argv = ["run", "--engine", "truth", "--url", truth.url, *load.split(), "--out", str(tmp_path)]
        assert done(main(argv), tmp_path)
    (path,) = tmp_path.iterdir()
    run = open_run(path)
    assert (run.summary.audit.answer, run.summary.audit.under_load.n) == (Replies.SAME, 6)


@pytest.mark.slow
@pytest.mark.usefixtures("without_page")
def test_equal_replies_are_the_same_and_an_audit_that_never_came_is_said(tmp_path):
    run, _ = audited(tmp_path, TruthSetup(), "-q", n=100)
    assert run.summary.audit.answer == Replies.SAME
    assert run.summary.audit.excess.low <= 0 <= run.summary.audit.excess.high
    for folder in AUDIT:
        for file in (run.path / folder).iterdir():
            file.unlink()
        (run.path / folder).rmdir()
    summary = write_report(RunDir(run.path))
    assert summary.audit.answer is None
    assert "replies-differ" not in {reason.code for reason in summary.verdict.warnings}
    assert json.loads((run.path / "summary.json").read_text())["audit"]["under_load"]["code"] == "not-audited"


@pytest.mark.parametrize(
    ("argv", "why"),
    [
        ("--temperature 0.7", "--temperature 0.7 differ by chance"),
        ("--request-kind embed", "--request-kind embed has none"),
        ('--extra-body {"temperature":0.7}', "temperature in --extra-body"),
        ("--url http://127.0.0.1:9,http://127.0.0.1:10", "one --url"),
        ("--audit 0", "--audit 0: expected a share above 0"),
    ],
)
def test_what_cannot_be_audited_is_refused_at_once(tmp_path, capsys, argv, why):
    url = [] if "--url" in argv else ["--url", "http://127.0.0.1:9"]
    flags = ["--engine", "truth", *url, "--audit", "2%", *argv.split()]
    flags = flags if argv != "--audit 0" else ["--engine", "truth", *url, "--audit", "0"]
    assert main(["run", *flags, "--out", str(tmp_path)]) == 2
    assert why in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_search_is_not_audited(capsys):
    assert main(["limit", "--engine", "truth", "--rate", "3", "--slo", "ttft.p99<=1s", "--audit", "2%"]) == 2
    assert "drop --audit" in capsys.readouterr().err
