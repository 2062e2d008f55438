"""Which server is measured: where it is or how it is started, and with which settings."""

import argparse
import os
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self

from burstline.console.flags import add_options, read_options
from burstline.errors import tables_beside
from burstline.servers.redact import Secret
from burstline.servers.registry import BUILT_IN
from burstline.servers.settings import Settings
from burstline.workloads.options import option, seconds

if TYPE_CHECKING:
    from burstline.workloads.load import Load

API_KEY_VARIABLE: Final = "BURSTLINE_API_KEY"
START: Final = ("port", "engine_python", "container")
"""The options of an engine that is started here."""
_ROWS: Final = tables_beside(__file__, "server_options.toml")


def own_key() -> Secret | None:
    key = os.environ.get(API_KEY_VARIABLE)
    return Secret(key) if key else None


def _hides(flag: str) -> dict[str, Any]:
    return {"parse": lambda text: Secret.words(flag, text)[1], "write": Secret.reveal}


@dataclass(frozen=True, slots=True, repr=False)  # a model's URL may have a login
class ServerOptions:
    """The server's options, as flags and as keys of a suite's [[engine]].

    `container` is the image to start it in, "" for the engine's own, None to start it without.
    `host` is the address at which an engine that is started listens.
    `n_concurrent` is how many requests there will be at once, `n_request_tok` the tokens of the longest.
    """

    engine: str | None = option(
        f"the engine to start, or that of the server at --url: {', '.join(BUILT_IN)}", **_ROWS["engine"]
    )
    url: tuple[Secret, ...] | None = option(
        f"a server that is already running, or several replicas, used in turn (API key: {API_KEY_VARIABLE})",
        parse=lambda text: Secret.words(*filter(None, map(str.strip, text.split(",")))),
        write=lambda urls: ",".join(map(Secret.reveal, urls)),
        **_ROWS["url"],
    )
    model: str | None = option(**_ROWS["model"])
    port: int | None = option(**_ROWS["port"], parse=int)
    engine_python: str | None = option(**_ROWS["engine_python"])
    container: str | None = option(**_ROWS["container"])
    endpoint: str | None = option(**_ROWS["endpoint"], choices=("native", "completions", "chat"))
    extra_body: Secret | None = option(**_ROWS["extra_body"], **_hides("--extra-body"))
    header: tuple[Secret, ...] = option(**_ROWS["header"], default=(), **_hides("-H"))
    lora: tuple[str, ...] = option(
        **_ROWS["lora"], default=(), parse=lambda text: tuple(filter(None, text.split(",")))
    )
    ready_s: float | None = option(**_ROWS["ready_s"], parse=seconds)
    ca_bundle: str | None = option(**_ROWS["ca_bundle"])
    insecure: bool = option(**_ROWS["insecure"], default=False, parse=bool)
    gpus: str | None = option(**_ROWS["gpus"])
    profile: Path | None = option(**_ROWS["profile"], parse=Path, bare=Path())
    settings: Settings = field(default_factory=Settings)
    engine_args: tuple[Secret, ...] = ()
    api_key: Secret | None = None
    host: str = "127.0.0.1"
    n_concurrent: int | None = None
    n_request_tok: int | None = None

    @property
    def urls(self) -> tuple[str, ...]:
        return tuple(url.reveal() for url in self.url or ())

    def with_room_for(self, *loads: "Load", least: int = 0) -> Self:
        """Room for each of these loads, and for at least so many requests, unless room was made before."""
        n = self.n_concurrent or max(least, *(load.n_at_once for load in loads))
        longest_tok = self.n_request_tok or max(load.longest_tok or 0 for load in loads) or None
        return replace(self, n_concurrent=n, n_request_tok=longest_tok)


def add_settings(group: argparse._ActionsContainer) -> None:
    add_options(group, Settings, about="setting: ")


def server_of(args: argparse.Namespace) -> ServerOptions:
    return read_options(
        ServerOptions,
        args,
        settings=read_options(Settings, args),
        engine_args=Secret.words(*args.engine_args),
        api_key=own_key(),
    )
