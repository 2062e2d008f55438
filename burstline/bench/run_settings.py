"""What a person asks of a run, and what its manifest keeps of that, of the server and of this machine."""

from __future__ import annotations

import platform
import shlex
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from burstline import __version__
from burstline.bench.load_options import Load
from burstline.bench.server_session import Site
from burstline.loadgen.record.manifest import ArrivalFacts, Manifest, ServerFacts
from burstline.machine import host_facts
from burstline.machine.hints import Hints
from burstline.server_options import ServerOptions
from burstline.servers.engine import Engine
from burstline.servers.messages import EngineError
from burstline.servers.protocol.destination import Destination
from burstline.servers.redact import without_secrets
from burstline.workloads.plan import Plan
from burstline.workloads.prompts import DrawnRequests
from burstline.workloads.spec import Goals, LoadSpec

if TYPE_CHECKING:  # it takes modules that only a run with --ray needs
    from burstline.cluster.placement import RayOptions


@dataclass(frozen=True, slots=True)
class Settings:
    """Everything that a person may say about a run."""

    where: ServerOptions = field(default_factory=ServerOptions)
    spec: LoadSpec = field(default_factory=LoadSpec)
    goals: Goals = field(default_factory=Goals)
    out: Path = Path("runs")
    quiet: bool = False
    canary: bool = True
    hints: Hints = field(default_factory=Hints)
    ray: RayOptions | None = None


def manifest_of(settings: Settings, load: Load, engine: Engine) -> Manifest:
    """The manifest of a run that begins."""
    return Manifest(
        engine=engine.name,
        workload=load.name,
        version=__version__,
        argv=("burstline", *sys.argv[1:]),
        commit=host_facts.commit(),
        python=platform.python_version(),
        libraries=host_facts.libraries(),
        host=host_facts.host(),
        devices=host_facts.devices(),
        title=load.title,
        asked=load.spec,
        concurrency=load.spec.concurrency,
        arrivals=ArrivalFacts(load.arrivals.pattern, load.arrivals.rate_per_s, load.arrivals.burstiness),
        targets=settings.goals.slo,
        max_failures=settings.goals.max_failures,
        seed=load.spec.seed,
        salt=load.spec.salt,
        repeat=_command_to_repeat(load.spec.salt),
    )


def _command_to_repeat(salt: str) -> str:
    """The command that asks for the same bytes again."""
    argv = ["burstline", *sys.argv[1:]]
    if "--salt" not in argv:
        at = argv.index("--") if "--" in argv else len(argv)
        argv[at:at] = ["--salt", salt]
    return shlex.join(without_secrets(argv))


def server_facts(site: Site, model: str | None) -> ServerFacts:
    """Which server it is, how it was started, and what the user must know of it."""
    made: tuple[str, ...] = ()
    if model and Path(model).is_dir():
        from burstline.models.model_folder import made_notes  # here: it imports tokenizers

        made = made_notes(Path(model))
    launch = site.launch
    return ServerFacts(
        url=site.target.url,
        model=site.target.model,
        model_asked=model,
        attached=site.server is None,
        argv=tuple(launch.argv) if launch else None,
        env=dict(launch.env) if launch else None,
        image=launch.image if launch else None,
        image_digest=launch.image_digest if launch else None,
        notes=(*site.notes, *made),
        ready_s=site.startup.ready_s,
        startup_stages=site.startup.stages,
        capabilities=site.capabilities,
        settings=site.settings,
        addresses=_n_addresses(site),
    )


def _n_addresses(site: Site) -> int | None:
    """How many addresses the server's URLs resolve to; None where they do not resolve here."""
    urls = (site.target.url, *site.target.replicas)
    try:
        return len({address for url in urls for _, address in Destination.of(url).addresses()})
    except (EngineError, OSError):
        return None


def form_of(plan: Plan) -> str:
    """Whether prompts go out as token ids or as text: tokenizing text is work that the server does."""
    if isinstance(plan.requests, DrawnRequests):
        return "ids"  # without looking at each: a million prompts take a minute to draw
    forms = {
        "chat" if r.messages is not None else "text" if r.prompt_ids is None else "ids" for r in plan.requests
    }
    return " and ".join(sorted(forms))
