"""Every recorded reply, as another client reads it and as Burstline does."""

import asyncio
from pathlib import Path

import pytest

from burstline.bench.second_reader import CLIENTS
from burstline.loadgen.capture.capture import Capture, CaptureWriter
from burstline.measure.metrics.audit import compared
from burstline.measure.record.decode import Reading, readings
from burstline.servers.messages import Call, Read
from burstline.servers.registry import ENGINES
from tests.servers.golden import GOLDEN

TGIS = b'{"inputs": "Hello world", "parameters": {"max_new_tokens": 8, "details": true}}'
RECORDED = [
    *(("httpx", "openai", path) for path in sorted(GOLDEN.glob("*/completions_*.http"))),
    *(("huggingface_hub", "tgi", path) for path in sorted(GOLDEN.glob("tgi/generate_stream*.http"))),
]


def read_by(client: str, raw: bytes) -> Reading:
    async def once() -> Reading:
        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(raw)
            writer.close()

        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/"
        try:
            return await CLIENTS[client](url, Call("POST", "/", TGIS))
        except Exception as error:
            return Reading(error=repr(error))
        finally:
            server.close()
            await server.wait_closed()

    return asyncio.run(once())


@pytest.mark.parametrize(
    ("client", "engine", "path"), RECORDED, ids=[str(path.relative_to(GOLDEN)) for *_, path in RECORDED]
)
def test_both_read_the_same_or_neither_can(
    client: str, engine: str, path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    raw = path.read_bytes()
    spool = CaptureWriter(tmp_path)
    spool.put(lambda: Capture(-1, 0, 0, 0, 0, 0, (Read(1, None, raw),)))
    spool.close()
    ours, theirs = readings(tmp_path, ENGINES[engine], {-1}), read_by(client, raw)
    if theirs.error is None:
        assert compared(client, [theirs], ours).differ == ()
    else:
        assert not ours, theirs.error
