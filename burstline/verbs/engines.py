"""`burstline engines`: installed engines, running servers, and how to install the others."""

import argparse
import signal
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor

from burstline.console import exit_codes
from burstline.reports.formats.text import columns
from burstline.servers.engine import Engine
from burstline.servers.host.ready import getter
from burstline.servers.messages import EngineError, Target
from burstline.servers.registry import ENGINES, engine_at
from burstline.workloads.request import WorkloadError

TIMEOUT_S = 3.0
COLUMNS = ("engine", "installed", "answers at", "container image")


def run(args: argparse.Namespace) -> int:
    own = {engine.default_port for engine in ENGINES.values() if engine.default_port is not None}
    try:
        more = {int(port) for port in args.ports.split(",") if port}
    except ValueError:
        raise WorkloadError(f"--ports {args.ports}: expected numbers such as 8000,8080") from None
    if wrong := sorted(port for port in more if not 0 < port < 65536):
        raise WorkloadError(f"--ports {args.ports}: there is no port {wrong[0]}; expected 1 to 65535")
    for number in (signal.SIGINT, signal.SIGTERM):  # nothing is at stake: it does not wait for the answers
        signal.signal(number, signal.SIG_DFL)
    print("\n".join(table(rows(sorted(own | more)))))
    return exit_codes.DONE


def rows(ports: Iterable[int]) -> list[tuple[Engine, str, list[str]]]:
    """Every engine, whether it is installed, and where it answers; asked all at once.

    Installed is its version here, "yes" where it tells none, "no" where it is not, "-" where it never is.
    """
    urls = [f"http://127.0.0.1:{port}" for port in ports]
    getters = [getter(Target(url, ""), timeout_s=TIMEOUT_S) for url in urls]
    with ThreadPoolExecutor(16) as pool:
        answering = pool.map(engine_at, getters)
        engines = list(ENGINES.values())
        installed = pool.map(_installed, engines)
        there = dict(zip(urls, answering, strict=True))
        return [
            (engine, version, [url for url, name in there.items() if name == engine.name])
            for engine, version in zip(engines, installed, strict=True)
        ]


def table(rows: Sequence[tuple[Engine, str, list[str]]]) -> list[str]:
    """The lines to show: the rows, then how to get each engine that is not here."""
    cells = [COLUMNS]
    for engine, installed, urls in rows:
        image = engine.image.name if engine.image else "-"
        cells.append((engine.name, installed, ", ".join(urls) or "-", image))
    missing = [f"{own.name}: {own.how_to_get}" for own, found, urls in rows if found == "no" and not urls]
    told = ["", "Not installed; how to get them:", *(f"  {line}" for line in missing)] if missing else []
    return [*columns(cells, words=range(len(COLUMNS))).splitlines(), *told]


def _installed(engine: Engine) -> str:
    try:
        version = engine.installed(None)
    except EngineError as error:
        return f"broken ({error})"
    absent = "-" if engine.default_port is None else "no"
    return absent if version is None else version or "yes"
