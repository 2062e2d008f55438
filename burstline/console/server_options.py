"""Which server is measured: where it is or how it is started, and with which settings."""

from __future__ import annotations

import argparse
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from burstline.console.flags import add_options, read_options
from burstline.servers.redact import Secret
from burstline.servers.registry import BUILT_IN
from burstline.servers.settings import Settings
from burstline.workloads.options import option, seconds

API_KEY_VARIABLE: Final = "BURSTLINE_API_KEY"
START: Final = ("port", "engine_python", "container")
"""The options of an engine that is started here."""


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
        f"the engine to start, or that of the server at --url: {', '.join(BUILT_IN)}",
        metavar="NAME",
        once=True,
    )
    url: tuple[Secret, ...] | None = option(
        f"a server that is already running, or several replicas, used in turn (API key: {API_KEY_VARIABLE})",
        parse=lambda text: Secret.words(*filter(None, map(str.strip, text.split(",")))),
        write=lambda urls: ",".join(map(Secret.reveal, urls)),
        metavar="URL[,URL...]",
        once=True,
    )
    model: str | None = option(
        "a model folder, or a name that the engine knows", metavar="NAME_OR_DIR", once=True
    )
    port: int | None = option(
        "port of the started engine (any free one)", parse=int, metavar="PORT", once=True
    )
    engine_python: str | None = option(
        "Python interpreter that has the engine installed", metavar="PATH", once=True
    )
    container: str | None = option(
        "start the engine in a container (docker or podman), from IMAGE or the engine's pinned image",
        metavar="IMAGE",
        bare="",
    )
    endpoint: str | None = option(
        "which API to use: the engine's own or one of OpenAI's (default: the one that counts tokens best)",
        choices=("native", "completions", "chat"),
    )
    extra_body: Secret | None = option(
        "JSON object to merge into the body of each request, e.g. '{\"min_p\": 0.1}'",
        metavar="JSON",
        **_hides("--extra-body"),
    )
    header: tuple[Secret, ...] = option(
        "HTTP header of each request (repeatable)", (), many=True, metavar="'NAME: VALUE'", **_hides("-H")
    )
    lora: tuple[str, ...] = option(
        "LoRA adapters, used in turn; a name given twice gets twice the share",
        (),
        parse=lambda text: tuple(filter(None, text.split(","))),
        metavar="NAME,...",
    )
    ready_s: float | None = option(
        "how long the server may take until its first token, e.g. to load a model", parse=seconds, metavar="S"
    )
    ca_bundle: str | None = option("additional certificates to trust", metavar="FILE")
    insecure: bool = option("do not verify TLS certificates", False, parse=bool)
    gpus: str | None = option(
        "the server's GPUs on this machine, by index or UUID (default: those that hold its processes)",
        metavar="N[,N...]",
    )
    profile: Path | None = option(
        "after the load, send a short second load with the engine's profiler on, and show how long each GEMM "
        "took; for a server at --url, name the folder where it writes its traces",
        parse=Path,
        metavar="DIR",
        bare=Path(),
    )
    settings: Settings = field(default_factory=Settings)
    engine_args: tuple[Secret, ...] = ()
    api_key: Secret | None = None
    host: str = "127.0.0.1"
    n_concurrent: int | None = None
    n_request_tok: int | None = None

    @property
    def urls(self) -> tuple[str, ...]:
        return tuple(url.reveal() for url in self.url or ())


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
