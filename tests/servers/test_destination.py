"""The bytes of a request, checked against a server's own reading of them."""

import base64

import pytest

from burstline.servers.messages import Call, EngineError
from burstline.servers.protocol.destination import Destination
from burstline.servers.secret import Secret


def fields(request: bytes) -> tuple[str, dict[str, str], bytes]:
    head, _, body = request.partition(b"\r\n\r\n")
    start, *lines = head.decode("latin-1").split("\r\n")
    return start, dict(line.split(": ", 1) for line in lines), body


def test_a_request_names_its_host_its_length_and_no_compression() -> None:
    start, head, body = fields(
        Destination.of("http://h:8000").serialised(Call("POST", "/v1/completions", b"{}"))
    )
    assert start == "POST /v1/completions HTTP/1.1"
    assert head["host"] == "h:8000"
    assert head["content-length"] == "2"
    assert head["accept-encoding"] == "identity"
    assert head["content-type"] == "application/json"
    assert body == b"{}"


@pytest.mark.parametrize(
    ("url", "host", "port"),
    [
        ("http://h", "h", 80),
        ("https://h/", "h", 443),
        ("https://h:8443", "h:8443", 8443),
        ("http://[::1]:8000", "[::1]:8000", 8000),
        ("http://H.example:80", "h.example", 80),
    ],
)
def test_the_host_has_a_port_only_where_it_is_not_the_schemes_own(url: str, host: str, port: int) -> None:
    destination = Destination.of(url)
    assert fields(destination.serialised(Call("GET", "/")))[1]["host"] == host
    assert destination.port == port
    assert "[" not in destination.host


def test_a_path_prefix_a_query_and_odd_letters_survive() -> None:
    start, _, _ = fields(Destination.of("http://h/pre fix/é").serialised(Call("GET", "/a%20b?x=1&y=ü")))
    assert start == "GET /pre%20fix/%C3%A9/a%20b?x=1&y=%C3%BC HTTP/1.1"


def test_a_header_of_the_call_replaces_ours_of_that_name() -> None:
    call = Call("GET", "/", headers=(("User-Agent", "other"), ("Authorization", "Bearer key")))
    _, head, _ = fields(Destination.of("http://h", Secret("user:w0rd-one")).serialised(call))
    assert (head["user-agent"], head["authorization"]) == ("other", "Bearer key")


def test_a_login_becomes_basic_authorization() -> None:
    _, head, _ = fields(Destination.of("http://h", Secret("us@er:w:ord")).serialised(Call("GET", "/")))
    assert base64.b64decode(head["authorization"].removeprefix("Basic ")) == b"us@er:w:ord"
    assert head["host"] == "h"


@pytest.mark.parametrize("url", ["ftp://h", "h:8000", "http://", "http://h:99999", "http://h:abc", ""])
def test_what_is_no_url_of_a_server_is_refused(url: str) -> None:
    with pytest.raises(EngineError, match="expected http://host:port"):
        Destination.of(url)
