"""Replies that the server did not count: who is asked, in which order, and what is kept."""

import asyncio
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from burstline.bench.recount import recount
from burstline.bench.server_session import Site
from burstline.loadgen.capture.capture import CaptureWriter
from burstline.measure.record.decode import GLANCE, uncounted
from burstline.measure.record.manifest import Manifest
from burstline.measure.record.rundir import RunDir, open_run
from burstline.measure.record.tables import counts_of
from burstline.servers.host.ready import Startup
from burstline.servers.identity import Identity
from burstline.servers.messages import Target
from burstline.servers.registry import ENGINES
from burstline.workloads.plan import Plan
from burstline.workloads.request import Request
from tests.burstline.answering import answering
from tests.measure.making import DONE, capture, event, records_of, usage, wire
from tests.servers.golden import decode_completion

COUNTS = "counts.parquet"
TEXTS = ("a b c", "a b c d e")
ENGINE = ENGINES["openai"]

Count = Callable[[str], int | None]


def written(parent: Path, counted: bool = False) -> RunDir:
    """A run of two replies in two chunks each, of three and five words."""
    run = RunDir.create(parent, Manifest(engine="openai", workload="burst"))
    run.save_plan(Plan(tuple(Request(i, None, "x", 1, 9) for i in range(2)), array("q", [0, 0]), 0, "x"))
    spool = CaptureWriter(run.captures)
    for index, text in enumerate(TEXTS):
        end = [(20, usage(len(text.split())))] if counted else []
        reads = wire(
            (10, event(text=text[:2])), (20, event(text=text[2:], finish="length")), *end, (30, DONE)
        )
        one = replace(capture(reads), index=index)
        spool.put(lambda one=one: one)
    spool.close()
    return run


@contextmanager
def tokenizing(count: Count) -> Iterator[tuple[Site, list[str]]]:
    """A server whose `/tokenize` counts by `count` (None: it has none), and what it was asked about."""
    asked: list[str] = []

    def answer(path: str, body: Any) -> tuple[int, object]:
        asked.append(body["prompt"])
        n = count(body["prompt"]) if path == "/tokenize" else None
        return (200, {"count": n}) if n else (404, {"detail": "Not Found"})

    with answering(answer) as url:
        capabilities = replace(ENGINE.capabilities, token_id_prompts=True)
        yield (
            Site(ENGINE, Target(url, "m"), Identity("openai"), None, None, Startup(0.0), capabilities),
            asked,
        )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A tokenizer by which each word is a token."""
    tokenizer = Tokenizer(models.WordLevel({"?": 0}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def kept(run: RunDir) -> dict[int, list[tuple[str, int]]]:
    return {index: list(counts) for index, counts in counts_of(pq.read_table(run.path / COUNTS)).items()}


def test_the_server_is_asked_and_a_local_tokenizer_says_how_far_it_would_be_off(folder: Path) -> None:
    run = written(folder / "runs")
    with tokenizing(lambda text: len(text.split()) + 1) as (site, asked):
        recount(run, site, folder, None, lambda words: None, ask=True)
    assert sorted(asked) == sorted(TEXTS)
    records = list(records_of(open_run(run.path).decoded()))
    assert {record.outcome for record in records} == {"ok"}
    assert [(record.output_tok, record.output_source, record.output_gap_tok) for record in records] == [
        (4, "tokenize", -1),
        (9, "tokenize", -1),  # it stopped for the length, and has more than half of it
    ]


def test_a_notebooks_own_loop_does_not_stand_in_the_way(folder: Path) -> None:
    async def cell() -> None:
        with tokenizing(lambda text: len(text.split())) as (site, _):
            recount(run, site, None, None, lambda _: None, ask=True)

    run = written(folder)
    asyncio.run(cell())
    assert pq.read_table(run.path / COUNTS).column("tokenize").to_pylist() == [3, 5]


def test_where_the_server_cannot_say_the_local_tokenizer_does(folder: Path) -> None:
    run = written(folder / "runs")
    with tokenizing(lambda text: None) as (site, _):
        recount(run, site, folder, None, lambda words: None, ask=True)
    assert kept(run) == {0: [("tokenizer", 3)], 1: [("tokenizer", 5)]}


def test_where_nobody_can_nothing_is_made_up_and_the_user_is_told(tmp_path: Path) -> None:
    run, said = written(tmp_path), list[str]()
    with tokenizing(lambda text: None) as (site, _):
        recount(run, site, None, None, said.append, ask=True)
    assert not (run.path / COUNTS).exists()
    assert "--tokenizer DIR" in said[-1]


def test_a_tokenizer_that_cannot_be_read_costs_nothing_but_its_counts(folder: Path) -> None:
    (folder / "tokenizer.json").write_text("{}")
    run, said = written(folder / "runs"), list[str]()
    with tokenizing(lambda text: len(text.split())) as (site, _):
        recount(run, site, folder, None, said.append, ask=True)
    assert kept(run) == {0: [("tokenize", 3)], 1: [("tokenize", 5)]}
    assert any("cannot be read" in words for words in said)


def test_a_server_that_failed_or_whose_user_wants_to_go_is_not_asked(folder: Path) -> None:
    run = written(folder / "runs")
    with tokenizing(lambda text: 1) as (site, asked):
        recount(run, site, folder, None, lambda words: None, ask=False)
    assert asked == []
    assert kept(run) == {0: [("tokenizer", 3)], 1: [("tokenizer", 5)]}


def test_an_interrupt_ends_the_counting_and_not_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = written(tmp_path)

    def interrupted(*_: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr("burstline.bench.recount.N_BATCH", 1)
    answers = iter([lambda: 3, interrupted])
    monkeypatch.setattr("burstline.bench.recount.count_in", lambda _: next(answers)())
    with tokenizing(len) as (site, _):
        recount(run, site, None, None, lambda words: None, ask=True)
    assert kept(run) == {0: [("tokenize", 3)]}


def test_a_server_that_counts_is_not_looked_through(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, said = written(tmp_path, counted=True), list[str]()
    with tokenizing(len) as (site, asked):
        recount(run, site, None, None, said.append, ask=True)
    assert (said, asked, (run.path / COUNTS).exists()) == ([], [], False)
    many = [capture(wire((10, event(1, finish="length")), (30, DONE)))] * GLANCE
    silent = capture(wire((10, event(finish="length")), (30, DONE)))
    monkeypatch.setattr("burstline.measure.record.decode.read_captures", lambda _: iter([*many, silent]))
    assert list(uncounted(run.captures, decode_completion)) == []
    monkeypatch.setattr(
        "burstline.measure.record.decode.read_captures", lambda _: iter([silent, *many, silent])
    )
    assert list(uncounted(run.captures, decode_completion)) == [(0, "x")] * 2
