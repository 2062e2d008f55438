"""The bytes of a request, checked against a server's own reading of them."""

import base64
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from burstline.servers.destination import Destination, addresses_of
from burstline.servers.host.process import free_port
from burstline.servers.messages import Call, EngineError, Target
from burstline.servers.redact import Secret


def at(url: str, login: Secret | None = None) -> Destination:
    return Destination.of(Target(url, "", login=login))


def fields(request: bytes) -> tuple[str, dict[str, str], bytes]:
    head, _, body = request.partition(b"\r\n\r\n")
    start, *lines = head.decode("latin-1").split("\r\n")
    return start, dict(line.split(": ", 1) for line in lines), body


def test_a_request_names_its_host_its_length_and_no_compression() -> None:
    start, head, body = fields(at("http://h:8000").serialised(Call("POST", "/v1/completions", b"{}")))
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
    destination = at(url)
    assert fields(destination.serialised(Call("GET", "/")))[1]["host"] == host
    assert destination.port == port
    assert "[" not in destination.host


def test_a_path_prefix_a_query_and_odd_letters_survive() -> None:
    start, _, _ = fields(at("http://h/pre fix/é").serialised(Call("GET", "/a%20b?x=1&y=ü")))
    assert start == "GET /pre%20fix/%C3%A9/a%20b?x=1&y=%C3%BC HTTP/1.1"


def test_a_header_of_the_call_replaces_ours_of_that_name() -> None:
    call = Call("GET", "/", headers=(("User-Agent", "other"), ("Authorization", "Bearer key")))
    _, head, _ = fields(at("http://h", Secret("user:w0rd-one")).serialised(call))
    assert (head["user-agent"], head["authorization"]) == ("other", "Bearer key")


def test_a_key_goes_into_each_request_and_counts_more_than_a_login() -> None:
    target = Target("http://h", "m", Secret("sk-0f-th1s-test"), login=Secret("user:w0rd-one"))
    _, head, _ = fields(Destination.of(target).serialised(Call("POST", "/", b"{}")))
    assert (head["authorization"], head["content-type"]) == ("Bearer sk-0f-th1s-test", "application/json")


def test_a_header_that_the_user_gives_counts_more_than_the_key_of_the_environment() -> None:
    target = Target(
        "http://h", "m", Secret("sk-0f-th1s-test"), headers=(Secret("Authorization: Bearer sk-own"),)
    )
    _, head, _ = fields(Destination.of(target).serialised(Call("GET", "/")))
    assert head["authorization"] == "Bearer sk-own"


def test_a_login_becomes_basic_authorization() -> None:
    _, head, _ = fields(at("http://h", Secret("us@er:w:ord")).serialised(Call("GET", "/")))
    assert base64.b64decode(head["authorization"].removeprefix("Basic ")) == b"us@er:w:ord"
    assert head["host"] == "h"


@pytest.mark.parametrize("url", ["ftp://h", "h:8000", "http://", "http://h:99999", "http://h:abc", ""])
def test_what_is_no_url_of_a_server_is_refused(url: str) -> None:
    with pytest.raises(EngineError, match="expected http://host:port"):
        at(url)


@pytest.fixture
def black_hole() -> Iterator[tuple[str, int]]:
    """An address that answers no connect: its listener's backlog is full, so the kernel drops what comes."""
    with socket.create_server(("127.0.0.1", 0), backlog=0) as listener, ExitStack() as waiting:
        for _ in range(4):
            sock = waiting.enter_context(socket.socket())
            sock.setblocking(False)
            sock.connect_ex(listener.getsockname())
        yield listener.getsockname()


def test_an_address_that_is_silent_costs_a_fraction_of_a_second_once(
    black_hole: tuple[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[object] = []
    connect = socket.socket.connect

    def watched(self: socket.socket, address: tuple[str, int]) -> None:
        asked.append(address)
        connect(self, address)

    with socket.create_server(("127.0.0.1", 0)) as healthy:
        answers = healthy.getsockname()
        both = [(socket.AF_INET, black_hole), (socket.AF_INET, answers)]
        monkeypatch.setattr(Destination, "addresses", lambda _: both)
        monkeypatch.setattr(socket.socket, "connect", watched)
        destination = at("http://dual.example:18500")
        began_s = time.monotonic()
        for _ in range(2):
            with destination.connected(90.0) as sock:
                assert sock.getpeername() == answers
                assert sock.gettimeout() == 90.0
        assert time.monotonic() - began_s < 30, "not half of the limit, as each would have of two"
    assert asked == [black_hole, answers, answers]


def test_where_no_address_answers_each_is_named(
    black_hole: tuple[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    both = [(socket.AF_INET, black_hole), (socket.AF_INET, ("127.0.0.1", free_port()))]
    monkeypatch.setattr(Destination, "addresses", lambda _: both[:1])
    with pytest.raises(OSError, match=r"^no connection to 127.0.0.1 within 0.3 s$"):
        at("http://one.example").connected(0.3)
    monkeypatch.setattr(Destination, "addresses", lambda _: both[1:])
    with pytest.raises(OSError, match="Connection refused"):
        at("http://other.example").connected(0.3)


PROXIES = {
    "none set": ({}, "llm.example", ""),
    "for https": ({"HTTPS_PROXY": "http://p:1"}, "llm.example", "HTTPS_PROXY is set, but Burstline connects"),
    "in lower case": ({"all_proxy": "http://p:1"}, "llm.example", "ALL_PROXY is set"),
    "not for this host": ({"HTTPS_PROXY": "http://p:1", "NO_PROXY": ".example"}, "llm.example", ""),
    "not for this machine": ({"HTTP_PROXY": "http://p:1"}, "127.0.0.1", ""),
}


@pytest.mark.parametrize(("environment", "host", "said"), PROXIES.values(), ids=PROXIES)
def test_a_proxy_that_is_not_used_is_named_where_no_connection_stands(
    environment: dict[str, str], host: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    closed = [(socket.AF_INET, ("127.0.0.1", free_port()))]
    monkeypatch.setattr(Destination, "addresses", lambda _: closed)
    with pytest.raises(OSError, match="refused") as caught:
        at(f"http://{host}").connected(1.0)
    assert said in str(caught.value)
    assert ("Burstline" in str(caught.value)) == bool(said)
    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    with pytest.raises(EngineError, match=r"cannot find the host .*: Name or service not known") as found:
        addresses_of(host, 80)
    assert said in str(found.value)
    assert ("Burstline" in str(found.value)) == bool(said)


def unknown(*_: object, **__: object) -> None:
    raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
