"""The settings of a run, and the manifest's facts about them, the server and this machine."""

from __future__ import annotations

import os
import platform
import shlex
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from burstline import __version__
from burstline.bench.server_session import Site
from burstline.console.server_options import ServerOptions
from burstline.machine import host_facts
from burstline.machine.hints import Hints
from burstline.measure.record.manifest import GpuFacts, Manifest, ServerFacts
from burstline.servers.destination import Destination
from burstline.servers.engine import Engine
from burstline.servers.host.gpus import Gpu
from burstline.servers.host.serving import ACROSS_BRIDGE, first_of_container
from burstline.servers.messages import EngineError
from burstline.servers.redact import without_secrets
from burstline.workloads.load import Load, load_of
from burstline.workloads.options import words_of
from burstline.workloads.plan import Plan
from burstline.workloads.prompts import DrawnRequests
from burstline.workloads.spec import Goals, LoadSpec

if TYPE_CHECKING:  # it takes modules that only a run with --ray needs
    from burstline.cluster.placement import RayOptions


@dataclass(frozen=True, slots=True)
class Settings:
    """Everything that a person may say about a run; `argv` is the command that says it, after `burstline`."""

    where: ServerOptions = field(default_factory=ServerOptions)
    load: Load = field(default_factory=lambda: load_of(LoadSpec()))
    goals: Goals = field(default_factory=Goals)
    out: Path = Path("runs")
    quiet: bool = False
    canary: bool = True
    calibrate: bool = True
    hints: Hints = field(default_factory=Hints)
    ray: RayOptions | None = None
    argv: tuple[str, ...] = ()

    def again(self, *options: object, verb: str = "run") -> str:
        """The command that asks for the same bytes again, of this run alone; `argv` may ask for several."""
        named = (self.load.spec, self.goals, self.hints, *options)
        words = ["burstline", *words_of_run(self.where, self.out, *named, verb=verb)]
        if not self.calibrate:
            words.insert(2, "--no-calibrate")
        if not self.canary:
            words.insert(2, "--no-canary")
        if self.ray is not None:
            resources = (f"{name}={n:g}" for name, n in self.ray.resources.items())
            words[2:2] = "--ray", ",".join([self.ray.address, *resources])
        return shlex.join(without_secrets(words))


def words_of_run(where: ServerOptions, out: Path, *options: object, verb: str = "run") -> tuple[str, ...]:
    """The command-line arguments of this run; `options` are the other dataclasses of its flags."""
    flags = chain.from_iterable(map(words_of, (where, where.settings, *options)))
    args = ("--", *(word.reveal() for word in where.engine_args)) if where.engine_args else ()
    return (verb, *flags, "--out", str(out), *args)


def manifest_of(settings: Settings, load: Load, engine: Engine) -> Manifest:
    """The manifest of a run that begins; `repeat` is the command that asks for the same bytes again."""
    return Manifest(
        engine=engine.name,
        workload=load.name,
        version=__version__,
        argv=("burstline", *settings.argv),
        commit=host_facts.commit(),
        python=platform.python_version(),
        libraries=host_facts.libraries(),
        host=host_facts.host(),
        title=load.title,
        asked=replace(load.spec, arrival=load.arrivals.arrival),
        targets=settings.goals.slo,
        max_failures=settings.goals.max_failures,
        repeat=settings.again(),
    )


def gpu_facts(gpu: Gpu) -> GpuFacts:
    size = gpu.value("memory_total_bytes")
    return GpuFacts(gpu.title, None if size is None else int(size), gpu.driver, gpu.is_slice or None)


def server_facts(site: Site, model: str | None) -> ServerFacts:
    """Which server it is, how it was started, and what the user must know of it."""
    made: tuple[str, ...] = ()
    if model and Path(model).is_dir():
        from burstline.models.model_folder import made_notes  # here: it imports tokenizers

        made = made_notes(Path(model))
    launch, n_addresses, argv = site.launch, None, None
    if launch is not None:
        argv = launch.argv
    elif (first := first_of_container(site.target.url)) is not None:
        made = (ACROSS_BRIDGE, *made)
        with suppress(psutil.Error):
            argv = without_secrets(psutil.Process(first).cmdline())
    with suppress(EngineError, OSError):  # they may not resolve here
        each = (replace(site.target, url=url) for url in (site.target.url, *site.target.replicas))
        n_addresses = len({address for one in each for _, address in Destination.of(one).addresses()})
    return ServerFacts(
        url=site.target.url,
        model=site.target.model,
        model_asked=model,
        attached=site.server is None,
        argv=None if argv is None else tuple(argv),
        env=dict(launch.env) if launch else None,
        image=launch.image if launch else os.environ.get("BURSTLINE_SERVER_IMAGE") or None,
        image_digest=launch.image_digest if launch else os.environ.get("BURSTLINE_SERVER_DIGEST") or None,
        notes=(*site.notes, *made),
        ready_s=site.startup.ready_s,
        startup_stages=site.startup.stages,
        capabilities=site.capabilities,
        settings=site.settings,
        addresses=n_addresses,
        n_cores=launch.n_cores if launch else None,
    )


def form_of(plan: Plan) -> str:
    """Whether prompts go out as token ids or as text: tokenizing text is work that the server does."""
    if isinstance(plan.requests, DrawnRequests):
        return "ids"  # without looking at each: a million prompts take a minute to draw
    forms = {
        "chat" if r.messages is not None else "text" if r.prompt_ids is None else "ids" for r in plan.requests
    }
    return " and ".join(sorted(forms))
