"""Deaths and silences of a server under load, on a clock of their own."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from burstline.bench.fire import VitalSigns
from burstline.bench.progress import Snapshot
from burstline.bench.server_session import Site
from burstline.servers.host.child import how_it_ended
from burstline.servers.host.ready import Startup
from burstline.servers.identity import Identity
from burstline.servers.messages import EngineError, Get, HttpReply, Target
from burstline.servers.registry import ENGINES
from tests.servers.golden import GOLDEN


class Server:
    """A process that lives until it is told otherwise, with TGI's recorded log of a killed shard."""

    exit_code: int | None = None

    def alive(self) -> bool:
        return self.exit_code is None

    def how_it_ended(self) -> str:
        return how_it_ended(self.exit_code)

    def log(self) -> str:
        lines = (GOLDEN / "tgi" / "server.log").read_text().splitlines()
        ready = next(k for k, line in enumerate(lines) if '"message":"Connected"' in line)
        return "\n".join(lines[: ready + 1] if self.alive() else lines)

    def last_line(self) -> str:
        return self.log().splitlines()[-1]


def watched(name: str, server: Any) -> tuple[VitalSigns, list[str]]:
    engine, told = ENGINES[name], []
    target, identity = Target("http://x", "m"), Identity(name)
    site = Site(engine, target, identity, server, None, Startup(1.0), engine.capabilities)
    return VitalSigns(site, told.append), told


def at(elapsed_s: float, n_bytes: int, done: int = 0) -> Snapshot:
    return Snapshot(
        planned=30, sent=30, first_tokens=30, done=done, failed=0, elapsed_s=elapsed_s, n_bytes=n_bytes
    )


def test_a_server_that_dies_is_told_at_once_with_when_its_last_words_and_what_was_open() -> None:
    server = Server()
    signs, told = watched("tgi", server)
    signs.look(at(1.0, 100))
    assert signs.death() is None
    server.exit_code = 1
    signs.look(at(2.5, 200, done=10))
    signs.look(at(2.75, 200, done=10))
    (line,) = told
    assert line == signs.death()
    assert line.startswith("TGI died 2.5 s into the load with 20 open requests, ended with exit code 1; ")
    assert "Server error: transport error" in line or "Shard" in line


def test_a_process_that_ends_only_after_its_last_requests_failed_died_when_they_did() -> None:
    server = Server()
    signs, told = watched("tgi", server)
    signs.look(replace(at(1.0, 100), failed=2))
    signs.look(replace(at(1.2, 150), failed=2))  # the server went on: those two it refused
    signs.look(replace(at(1.5, 200), failed=10))
    signs.look(replace(at(1.6, 200), failed=30))
    server.exit_code = 1
    assert told == []
    line = signs.death() or ""
    assert line.startswith("TGI died 1.5 s into the load with 28 open requests, ended with exit code 1; ")


def test_a_server_that_ended_after_a_whole_load_took_nothing_with_it() -> None:
    server = Server()
    signs, _ = watched("tgi", server)
    signs.look(replace(at(1.0, 100), failed=2))
    signs.look(replace(at(1.2, 150), failed=2))
    signs.look(replace(at(1.4, 150, done=28), failed=2))
    server.exit_code = 1
    assert (signs.death() or "").startswith("TGI died during the load, ended with exit code 1; ")


def test_an_engine_that_died_under_a_launcher_that_lives_is_a_death() -> None:
    class FrontEnd(Server):
        def log(self) -> str:
            return "ERROR 11-22 [s.py:5] v.EngineDeadError: See stack trace (above) for the root cause.\n"

    signs, told = watched("vllm", FrontEnd())
    cause = "EngineDeadError: a process of its engine core ended"
    assert signs.death() == f"vLLM died during the load, while its launcher is still running; {cause}"
    signs.look(at(1.0, 100))
    assert told == []
    signs.look(replace(at(1.5, 100), failed=30))
    assert told == [
        f"vLLM died 1.5 s into the load with 30 open requests, while its launcher is still running; {cause}"
    ]


def test_a_shard_that_crashed_under_a_launcher_that_lives_is_a_death() -> None:
    log = (GOLDEN / "tgi" / "server.log").read_text()
    assert ENGINES["tgi"].dead(log) == "Shard 0 crashed: Server error: transport error"
    assert ENGINES["tgi"].dead(Server().log()) is None


def test_a_server_that_was_killed_is_told_by_the_name_of_the_signal() -> None:
    server = Server()
    signs, told = watched("llamacpp", server)
    server.exit_code = -9
    signs.look(at(2.0, 100))
    assert told[0].startswith(
        "llama.cpp died 2.0 s into the load with 30 open requests, killed by signal 9 (often: out of "
        "memory); "
    )


@pytest.mark.parametrize(
    ("status", "words"),
    [
        (200, "; the server still says healthy (/health answers 200)"),
        (None, "; /health does not answer either"),
    ],
)
def test_streams_that_all_fall_silent_are_told_once_though_the_server_says_healthy(
    monkeypatch: pytest.MonkeyPatch, status: int | None, words: str
) -> None:
    def get(path: str) -> HttpReply:
        if status is None:
            raise EngineError("nothing answers")
        return HttpReply(status, {}, b"")

    def getter(_: Target, *, timeout_s: float) -> Get:
        assert timeout_s <= 5, "the load is not looked after meanwhile"
        return get

    monkeypatch.setattr("burstline.bench.fire.getter", getter)
    signs, told = watched("lightllm", None)
    for elapsed_s in (1.0, 10.0, 20.9):
        signs.look(at(elapsed_s, 500))
    assert told == []
    for elapsed_s in (21.0, 30.0, 60.0):
        signs.look(at(elapsed_s, 500))
    assert told == [f"No token from any of 30 streams for 20 s{words}"]


def test_a_load_that_waits_for_nothing_is_not_silent() -> None:
    signs, told = watched("lightllm", None)
    for elapsed_s in range(100):
        signs.look(at(float(elapsed_s), 500, done=30))
    assert told == []
