"""The server that a load goes to: where its sockets connect, and the bytes of a request to it (RFC 9112).

What a user adds to each request (`--extra-body`, `--lora`) is laid over it by `dressed`.
"""

import base64
import functools
import socket
import ssl
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Final, Self
from urllib.parse import SplitResult, quote, urlsplit

import orjson

from burstline.servers.messages import Call, EngineError, Target

_PORTS = {"http": 80, "https": 443}
_HEADERS = {
    "accept": "*/*",
    "accept-encoding": "identity",  # a compressed body says nothing about when its tokens came
    "connection": "keep-alive",
    "user-agent": "burstline",
}
_IN_A_TARGET = "/?:@!$&'()*+,;=%-._~"
"""What stands in a request target as it is; `%` because the user may have quoted the rest."""
NEXT_ADDRESS_S: Final = 0.25
"""How long an address may be silent before the next one is tried (RFC 8305, section 5)."""
_answered: dict[tuple[str, int], Any] = {}
"""The address of a host and port that answered this process last: it is tried first."""


@dataclass(frozen=True)
class Destination:
    """A target's base URL, taken apart once. EngineError where it is no http or https URL with a host."""

    target: Target
    url: SplitResult
    port: int

    @classmethod
    def of(cls, target: Target) -> Self:
        try:
            parts = urlsplit(target.url.rstrip("/"))
            port = parts.port or _PORTS[parts.scheme]
        except (ValueError, KeyError):
            parts, port = SplitResult("", "", "", "", ""), 0
        if not parts.hostname:
            raise EngineError(f"expected http://host:port or https://host:port, got {target.url!r}")
        return cls(target, parts, port)

    @property
    def host(self) -> str:
        return self.url.hostname or ""

    def addresses(self) -> list[tuple[int, Any]]:
        return addresses_of(self.host, self.port)

    def connected(self, timeout_s: float) -> socket.socket:
        """A connection to the first address that answers; OSError, with what was tried, where none does."""
        until_s, known, why = time.monotonic() + timeout_s, _answered.get((self.host, self.port)), ""
        silent = sorted(self.addresses(), key=lambda each: each[1] != known)
        for patience_s in (NEXT_ADDRESS_S, timeout_s)[len(silent) < 2 :]:
            asked, silent = silent, []
            for k, (family, address) in enumerate(asked):
                sock = socket.socket(family, socket.SOCK_STREAM)
                share_s = (until_s - time.monotonic()) / (len(asked) - k)
                sock.settimeout(max(1e-3, min(patience_s, share_s)))
                try:
                    sock.connect(address)
                    sock.settimeout(timeout_s)
                    _answered[self.host, self.port] = address
                    return sock
                except OSError as error:
                    sock.close()
                    why = str(error)
                    silent += [(family, address)] if isinstance(error, TimeoutError) else []
        if silent:
            why = f"no connection to {' or '.join(str(at[0]) for _, at in silent)} within {timeout_s:g} s"
        raise OSError(f"{why}{_proxy_hint(self.host)}")

    def tls(self) -> ssl.SSLContext | None:
        """The certificates that this machine trusts, and those of `ca_bundle`; None without TLS.

        EngineError where the bundle cannot be read.
        """
        if self.url.scheme != "https":
            return None
        return trusted(self.target.ca_bundle, insecure=self.target.insecure)

    def serialised(self, call: Call) -> bytes:
        """The whole request. A header of the call replaces ours of the same name."""
        own = {name.lower(): value for name, value in call.headers}
        fields = list((self._fields | own).items())
        if call.body or call.method == "POST":
            fields.append(("content-length", str(len(call.body))))
        target = quote(self.url.path + call.path, safe=_IN_A_TARGET)
        start = f"{call.method} {target} HTTP/1.1"
        lines = [start, *(f"{name}: {value}" for name, value in fields), "", ""]
        return "\r\n".join(lines).encode("latin-1") + call.body

    @cached_property
    def _fields(self) -> dict[str, str]:
        name = f"[{self.host}]" if ":" in self.host else self.host
        if self.port != _PORTS[self.url.scheme]:
            name = f"{name}:{self.port}"
        fields = {"host": name, **_HEADERS}
        if login := self.target.login:
            fields["authorization"] = f"Basic {base64.b64encode(login.reveal().encode()).decode()}"
        if key := self.target.api_key:
            fields["authorization"] = f"Bearer {key.reveal()}"
        own = (header.reveal().partition(":") for header in self.target.headers)
        return fields | {name.strip().lower(): value.strip() for name, _, value in own}


@functools.cache
def trusted(ca_bundle: str | None, *, insecure: bool) -> ssl.SSLContext:
    """The TLS context. It is built once, because loading certificates takes 20 ms of CPU."""
    context = ssl.create_default_context()
    try:
        if ca_bundle is not None:
            context.load_verify_locations(ca_bundle)
    except OSError as error:  # an SSLError is one, too
        raise EngineError(f"--ca-bundle {ca_bundle}: no certificates can be read ({error})") from error
    if insecure:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context


def addresses_of(host: str, port: int) -> list[tuple[int, Any]]:
    """Every (address family, socket address) of a host; EngineError where it has none."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        why = f"{getattr(error, 'strerror', None) or error}; check the URL{_proxy_hint(host)}"
        raise EngineError(f"cannot find the host {host!r}: {why}") from error
    return [(family, address) for family, _, _, _, address in found]


def _proxy_hint(host: str) -> str:
    """That a proxy is set which is not used, where one would be used for this host; else ""."""
    from urllib.request import getproxies, proxy_bypass  # takes long to import

    names = [f"{each.upper()}_PROXY" for each in getproxies() if each in ("https", "http", "all")]
    if not names or host in ("localhost", "::1") or host.startswith("127.") or proxy_bypass(host):
        return ""
    return f"; {names[0]} is set, but Burstline connects directly: a proxy would be measured too"


def dressed(call: Call, target: Target, index: int, lora_path: Sequence[str] | None) -> Call:
    """The call with the target's extra fields laid over its own, and the adapter of this request.

    Adapters take turns by the request's index; `lora_path` is where in the body the engine reads the name.
    Objects are merged, anything else is replaced.
    """
    if target.extra_body is None and not target.loras:
        return call
    body = orjson.loads(call.body)
    if target.extra_body is not None:
        body = merged(body, orjson.loads(target.extra_body.reveal()))
    if target.loras and lora_path:
        node = body
        for key in lora_path[:-1]:
            node = node.setdefault(key, {})
        node[lora_path[-1]] = target.loras[index % len(target.loras)]
    return replace(call, body=orjson.dumps(body))


def merged(body: Mapping[str, Any], extra: Mapping[str, Any]) -> dict[str, Any]:
    """`extra` laid over `body`, objects inside objects too."""
    out = dict(body)
    for key, value in extra.items():
        own = out.get(key)
        out[key] = merged(own, value) if isinstance(own, dict) and isinstance(value, dict) else value
    return out
