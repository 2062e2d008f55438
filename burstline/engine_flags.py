"""The flags that say which engine: where it is or how it is started, and with which settings."""

from __future__ import annotations

import argparse
import os
from typing import TYPE_CHECKING

from burstline.flags import Once, add_options, read_options
from servers.settings import Settings

if TYPE_CHECKING:
    from burstline.bench.server_session import Where

API_KEY_VARIABLE = "BURSTLINE_API_KEY"


def add_engine(group: argparse._ActionsContainer) -> None:
    """Which engine, started or attached to, and with which settings."""
    group.add_argument(
        "--engine", action=Once, metavar="NAME", help="the engine to start, or the dialect spoken at --url"
    )
    group.add_argument(
        "--url",
        action=Once,
        metavar="URL[,URL...]",
        help="drive the server that already runs there, or its replicas in turn, one for each worker (its "
        f"API key: {API_KEY_VARIABLE})",
    )
    group.add_argument(
        "--model", action=Once, metavar="NAME_OR_DIR", help="a model folder, or a name the engine knows"
    )
    add_start(group)
    add_settings(group)
    add_requests(group)


def add_requests(group: argparse._ActionsContainer) -> None:
    """How requests are asked, besides what they ask for."""
    group.add_argument(
        "--endpoint",
        choices=("native", "completions", "chat"),
        help="the API to ask by: the engine's own, or one of OpenAI's (the one that counts best)",
    )
    group.add_argument(
        "--extra-body",
        metavar="JSON",
        help="an object laid over each request's body, e.g. '{\"min_p\": 0.1}'",
    )
    group.add_argument(
        "--header",
        action="append",
        default=[],
        metavar="'NAME: VALUE'",
        help="sent with each request (repeatable)",
    )
    group.add_argument(
        "--lora",
        metavar="NAME,...",
        help="adapters that requests name in turn; a name given twice gets twice the share",
    )
    group.add_argument("--ca-bundle", metavar="FILE", help="certificates to trust besides this machine's")
    group.add_argument("--insecure", action="store_true", help="trust any certificate")


def add_start(group: argparse._ActionsContainer) -> None:
    """How an engine is started."""
    group.add_argument("--port", action=Once, type=int, help="for the engine that is started (any free one)")
    group.add_argument(
        "--vllm-python",
        "--engine-python",
        action=Once,
        dest="engine_python",
        metavar="PATH",
        help="the interpreter that has the engine installed",
    )
    group.add_argument(
        "--container",
        nargs="?",
        const="",
        metavar="IMAGE",
        help="start the engine in a container, of its own pinned image or this one (docker or podman)",
    )


def add_settings(group: argparse._ActionsContainer) -> None:
    """Settings in one spelling for all engines; `servers/settings.py` says what each means."""
    add_options(group, Settings, once=True, about="setting: ")


def settings_of(args: argparse.Namespace) -> Settings:
    """The settings that were given."""
    return read_options(Settings, args)


def urls_of(args: argparse.Namespace) -> list[str]:
    """The base URLs that were given, separated by commas."""
    return [url.strip() for url in (getattr(args, "url", None) or "").split(",") if url.strip()]


def share_replicas(args: argparse.Namespace) -> None:
    """As many workers as there are URLs, or a multiple: each worker drives one of them."""
    from workloads.request import WorkloadError

    n_urls, workers = len(urls_of(args)), args.workers
    if n_urls < 2:
        return
    if workers == 1:
        args.workers = n_urls
    elif workers == "auto" or workers % n_urls:
        raise WorkloadError(
            f"--workers {workers} cannot share {n_urls} URLs evenly: each worker drives one; give a multiple "
            f"of {n_urls}"
        )


def where_of(args: argparse.Namespace) -> Where:
    """What the flags say about the server."""
    from burstline.bench.server_session import Where

    urls = urls_of(args)
    return Where(
        engine=args.engine,
        url=urls[0] if urls else None,
        replicas=tuple(urls[1:]),
        model=args.model,
        python=args.engine_python,
        port=args.port,
        api_key=os.environ.get(API_KEY_VARIABLE),
        engine_args=tuple(args.engine_args),
        container=args.container,
        settings=settings_of(args),
        endpoint=getattr(args, "endpoint", None),
        extra_body=getattr(args, "extra_body", None),
        headers=tuple(getattr(args, "header", ())),
        loras=tuple(filter(None, (getattr(args, "lora", None) or "").split(","))),
        ca_bundle=getattr(args, "ca_bundle", None),
        insecure=getattr(args, "insecure", False),
    )
