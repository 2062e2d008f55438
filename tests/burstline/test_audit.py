"""`run --audit`: replies under load, beside those to the same requests alone."""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.metadata import version
from pathlib import Path

import pytest

from burstline.bench.conclusion import write_report
from burstline.cli import main
from burstline.measure.metrics.audit import audit_sentence
from burstline.measure.record.decode import readings
from burstline.measure.record.run_writer import AUDIT
from burstline.measure.record.rundir import Run, open_run
from burstline.measure.record.summary import SecondReader
from burstline.measure.record.verdict import Replies, State, Verdict
from burstline.servers.messages import Reply
from burstline.servers.registry import ENGINES
from tests.servers.golden import GOLDEN
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
    captured = readings(run.path / "captures", ENGINES["truth"], range(N))
    n_swapped = sum(reading.generated[3] != 3 for reading in captured.values())
    assert audit.answer == Replies.MORE
    assert round(audit.under_load.point * N) == n_swapped > 0
    assert (audit.alone.point, audit.cut_short.point) == (0, 0)
    assert audit.excess.low > 0
    assert (audit.first_difference_p50.point, audit.first_difference_p50.unit) == (3, "tokens")
    assert "replies-differ" in {reason.code for reason in run.summary.verdict.warnings}
    assert f"at most {N} of its requests are sent again, alone and twice: {2 * N} in all" in said.err
    assert f"Audit: {n_swapped} of {N} replies differ" in " ".join(said.out.split())
    assert n_served >= 3 * N
    assert audit.second_reader == SecondReader(f"httpx {version('httpx')}", N)
    # No figure counts what was sent again, and the page comes from the run's files alone.
    assert len(run.record_table.to_pandas()) == run.summary.counts["ok"] == N
    page = run.path.joinpath("report.html").read_bytes()
    write_report(open_run(run.path))
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
    summary = write_report(open_run(run.path))
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


@contextmanager
def recorded(folder: Path) -> Iterator[str]:
    """The URL of a server that answers each path with its recorded reply, byte for byte.

    Before the load it is asked how many tokens it counts in other texts.
    """
    token = '{"index":1,"token":{"id":5,"text":"a","logprob":0,"special":false},"details":'

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.answer(folder / f"{self.path.strip('/')}.http")

        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
            if asked["parameters"]["max_new_tokens"] == 8:
                self.answer(folder / "generate_stream.http")
                return
            self.send_response(200)
            self.send_header("content-type", "text/event-stream")
            self.end_headers()
            n = len(asked["inputs"].split())
            details = {"finish_reason": "length", "generated_tokens": 1, "input_length": n}
            self.wfile.write(f"data:{token}{json.dumps(details)}}}\n\n".encode())

        def answer(self, reply: Path) -> None:
            self.close_connection = True
            if reply.exists():
                self.wfile.write(reply.read_bytes())
            else:
                self.send_error(404)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,)).start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()


def one_token_less(reply: Reply) -> Reply:
    n = reply.n_output_usage if reply.n_output_ids is None else reply.n_output_ids
    name = "n_output_usage" if reply.n_output_ids is None else "n_output_ids"
    return replace(reply, **{name: n - 1})


def another_reason(reply: Reply) -> Reply:
    return replace(reply, finish_reason="stop")


def found_in(run: Run, monkeypatch, plant: Callable[[Reply], Reply] | None) -> Verdict:
    """What the page says once our parser misreads so; None: it loses the first event of a reply."""
    kind = type(ENGINES[run.manifest.engine])
    decode, generated = kind.decode, kind.generated
    if plant is None:
        monkeypatch.setattr(kind, "generated", lambda self, answers: generated(self, answers[1:]))
    else:
        monkeypatch.setattr(kind, "decode", lambda self, reply: plant(decode(self, reply)))
    return write_report(open_run(run.path)).verdict


PLANTED = [
    (one_token_less, "token count 8, Burstline 7"),
    (another_reason, "finish reason 'length', Burstline 'stop'"),
    (None, ": reply "),
]


@pytest.fixture(scope="module")
def openai_run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return audited(tmp_path_factory.mktemp("openai"), TruthSetup(), "-q", engine="openai", n=10)[0]


@pytest.fixture(scope="module")
def tgi_run(tmp_path_factory: pytest.TempPathFactory, tokenizer: Path) -> Run:
    """At a server that plays back what a TGI answered."""
    out = tmp_path_factory.mktemp("tgi")
    load = "--requests 10 --concurrency 5 --prompt-tokens 8 --output-tokens 8 --audit 100% --no-canary -q"
    with recorded(GOLDEN / "tgi") as url:
        where = ["--engine", "tgi", "--url", url, "--tokenizer", str(tokenizer)]
        assert done(main(["run", *where, *load.split(), "--out", str(out)]), out)
    (path,) = out.iterdir()
    return open_run(path)


@pytest.mark.slow
def test_huggingfaces_own_client_reads_tgis_recorded_replies_as_burstline_does(tgi_run: Run) -> None:
    audit = tgi_run.summary.audit
    client = f"huggingface_hub {version('huggingface_hub')}"
    assert audit.second_reader == SecondReader(client, 10)
    assert (audit.answer, audit.under_load.n) == (Replies.SAME, 10)
    assert tgi_run.summary.verdict.state != State.NOT_COMPARABLE
    assert f"{client} read the same text, token count and finish reason" in audit_sentence(audit)


@pytest.mark.slow
@pytest.mark.usefixtures("without_page")
@pytest.mark.parametrize("fixture", ["openai_run", "tgi_run"])
@pytest.mark.parametrize(("plant", "told"), PLANTED)
def test_a_planted_misreading_is_found(request, monkeypatch, fixture: str, plant, told: str) -> None:
    run: Run = request.getfixturevalue(fixture)
    assert run.summary.audit.second_reader.n == 10
    verdict = found_in(run, monkeypatch, plant)
    (misread,) = [reason for reason in verdict.reasons if reason.code == "misread"]
    assert "read 10 of 10 replies differently" in misread.text
    assert told in misread.text
