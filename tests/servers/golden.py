"""Recorded HTTP replies, read with the standard library's parser: an opinion that is not ours."""

import http.client
import io
from functools import partial
from pathlib import Path

from burstline.servers.messages import HttpReply
from burstline.servers.openai import take
from burstline.servers.replies import decode_reply

GOLDEN = Path(__file__).parent.parent / "golden"
decode_completion = partial(decode_reply, take=take)
"""As every engine decodes that speaks OpenAI's completions."""


class _Socket:
    def __init__(self, raw: bytes) -> None:
        self._raw = raw

    def makefile(self, *_: object) -> io.BytesIO:
        return io.BytesIO(self._raw)


def http_reply(raw: bytes) -> HttpReply:
    """A recorded reply with its chunked coding taken off; what a cut body still held is kept."""
    response = http.client.HTTPResponse(_Socket(raw))  # type: ignore[arg-type]
    response.begin()
    try:
        body, complete = response.read(), True
    except http.client.IncompleteRead as cut:
        body, complete = cut.partial, False
    headers = {name.lower(): value for name, value in response.getheaders()}
    return HttpReply(response.status, headers, body, complete)


def golden_reply(name: str) -> HttpReply:
    return http_reply((GOLDEN / name).read_bytes())
