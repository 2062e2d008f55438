"""A server behind a loopback URL, by itself and behind a relay of our own, with and without other work."""

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from burstline.cli import main
from burstline.measure.record.verdict import State
from burstline.servers.host.process import Server, free_port, start
from burstline.servers.host.ready import wait_ready
from burstline.servers.host.serving import ServingProcesses
from burstline.servers.launch import LaunchOptions
from burstline.servers.messages import Target
from burstline.servers.registry import ENGINES

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux says who listens")

RELAY = """
import asyncio, sys

async def copy(source, sink):
    while data := await source.read(1 << 16):
        sink.write(data)
        await sink.drain()
    sink.close()

async def relay(reader, writer):
    upstream = await asyncio.open_connection("127.0.0.1", int(sys.argv[2]))
    await asyncio.gather(copy(reader, upstream[1]), copy(upstream[0], writer), return_exceptions=True)

async def main():
    server = await asyncio.start_server(relay, "127.0.0.1", int(sys.argv[1]))
    print("up", flush=True)
    await server.serve_forever()

asyncio.run(main())
"""


@contextmanager
def running(code: str, *arguments: object) -> Iterator[None]:
    argv = [sys.executable, "-c", code, *map(str, arguments)]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, start_new_session=True) as process:
        try:
            assert process.stdout is not None
            process.stdout.readline()
            yield
        finally:
            process.kill()


@contextmanager
def burners(n: int) -> Iterator[None]:
    if not n:
        yield
        return
    with running("print(flush=True)\nwhile True: pass"), burners(n - 1):
        yield


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """The port of an embedded engine, which computes on this CPU."""
    folder, port, engine = tmp_path_factory.mktemp("engine"), free_port(), ENGINES["reference"]
    launch = engine.launch(LaunchOptions("", "127.0.0.1", port, "reference", folder))
    with start(launch, folder / "log") as server:
        assert isinstance(server, Server)
        wait_ready(engine, server, Target(f"http://127.0.0.1:{port}", "reference"))
        yield port


def ran(port: int, folder: Path) -> dict:
    load = ["--concurrency", "2", "--duration-s", "3", "--output-tokens", "16"]
    url = ["--url", f"http://127.0.0.1:{port}", "--engine", "reference"]
    main(["run", *url, *load, "--prompt-tokens", "64", "--out", str(folder), "-q"])
    return json.loads(next(folder.glob("*/summary.json")).read_text())


def verdict_text(found: dict) -> str:
    return " ".join(reason["text"] for reason in found["verdict"]["reasons"])


def codes(reasons: list[dict]) -> list[str]:
    return [reason["code"] for reason in reasons]


@pytest.mark.usefixtures("without_page")
@pytest.mark.measures("DISTURBED")
@pytest.mark.parametrize("foreign", [0, 2])
def test_a_server_at_a_loopback_url_is_told_from_other_work(
    engine: int, foreign: int, tmp_path: Path
) -> None:
    with burners(foreign):
        found = ran(engine, tmp_path)
        burning = {each.pid for each in psutil.Process().children() if each.cmdline()[-1].endswith("pass")}
    named = json.loads(next(tmp_path.glob("*/manifest.json")).read_text())["others_cpu"]
    pids = {int(name.rpartition(" ")[2].rstrip(")")) for name in named}
    assert pids >= burning, "they are named"
    assert not pids & ServingProcesses.at(f"http://127.0.0.1:{engine}").pids(), "the server is none of them"
    assert all(name in verdict_text(found) for name in named if foreign and len(named) <= 3)
    client, verdict = found["instrument"], found["verdict"]
    assert client["server_cpu_s"]["point"] > 0.2, "it computes"
    assert found["memory"]["server_pss_bytes"]["point"] > 1e8
    assert (
        ("busy-machine" in codes(verdict["reasons"]))
        == (verdict["state"] == State.DISTURBED)
        == (foreign > 0)
    )


@pytest.mark.usefixtures("without_page")
@pytest.mark.measures("DISTURBED")
@pytest.mark.parametrize("foreign", [0, 2])
def test_behind_a_relay_no_verdict_rests_on_what_cannot_be_told_apart(
    engine: int, foreign: int, tmp_path: Path
) -> None:
    port = free_port()
    with burners(foreign), running(RELAY, port, engine):
        found = ran(port, tmp_path)
    said = f"the server is not watched: what listens there talks to 127.0.0.1:{engine}"
    assert found["instrument"]["server_cpu_s"]["absent"] == said
    assert found["memory"]["server_peak_bytes"]["absent"] == said
    assert "busy-machine" not in codes(found["verdict"]["reasons"])
    warned = [each["advice"] for each in found["verdict"]["warnings"] if each["code"] == "busy-machine"]
    assert said in "".join(warned), "the engine's own time is in other hands, as far as is known"


@pytest.mark.measures
@pytest.mark.usefixtures("without_page")
def test_a_run_too_short_to_judge_says_so(engine: int, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    main(["run", "--engine", "truth", "--requests", "8", "--output-tokens", "2", "--out", str(tmp_path)])
    found = json.loads(next(tmp_path.glob("*/summary.json")).read_text())
    assert found["verdict"]["state"] == State.VALID
    assert "TOO SHORT: " in capsys.readouterr().out
