"""Where the load goes: an engine that Burstline starts and stops, or a server that is already running."""

import json
import re
import shlex
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Final

import huggingface_hub as hub
from huggingface_hub import constants

from burstline.console.server_options import API_KEY_VARIABLE, START, ServerOptions
from burstline.errors import tables_beside
from burstline.loadgen.capture.files import TRACES
from burstline.servers.engine import Engine
from burstline.servers.host.container import engine_pid, find_runtime, launch_in_container
from burstline.servers.host.process import Server, free_port, require_free_port, require_host, start
from burstline.servers.host.ready import (
    PAGE_TIMEOUT_S,
    RefusalError,
    Startup,
    getter,
    identified,
    send,
    wait_ready,
)
from burstline.servers.host.serving import UNKNOWN, ServingProcesses
from burstline.servers.identity import Capabilities, Identity
from burstline.servers.introspection import first_model
from burstline.servers.launch import Launch, LaunchOptions
from burstline.servers.messages import EngineError, Get, Target, target_at
from burstline.servers.openai import COMPLETION_LIMIT
from burstline.servers.redact import can_be_known
from burstline.servers.registry import ENGINES, STYLES, engine_at
from burstline.servers.settings import Setting, Settings, Spelled, spell
from burstline.servers.settings import check as check_settings
from burstline.wording import hint
from burstline.workloads.model_files import read_json
from burstline.workloads.options import flag_of
from burstline.workloads.request import WorkloadError

ATTACH_TIMEOUT_S = 15.0
PROBE_TIMEOUT_S = 60.0
HOST = "127.0.0.1"
EVERYWHERE = {"0.0.0.0": HOST, "::": "::1"}  # noqa: S104 only where a user asks for it
STARTING_GRACE_S = 5.0
"""How long an engine that is not ready may take from SIGTERM to its end: it has no requests to finish."""
SLOW_STOP_S = 0.9
"""Report a stop that takes longer: TGI lets open streams finish for up to 90 s, LightLLM for 60 s."""

WITHOUT_MASK: Final = "The key or password is too short or common to mask in the server's texts and log."
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Site:
    """A server that has generated a token. `server` is None where we did not start it.

    `capabilities` are the engine's, or what this one was seen to take, `notes` what the user must know of it.
    """

    engine: Engine
    target: Target
    identity: Identity
    server: Server | None
    launch: Launch | None
    startup: Startup
    capabilities: Capabilities
    processes: ServingProcesses = UNKNOWN
    notes: tuple[str, ...] = ()
    settings: tuple[Setting, ...] = ()


def with_options(target: Target, where: ServerOptions) -> Target:
    """The target with what the user adds to each request; WorkloadError where that makes no sense."""
    return replace(
        target,
        extra_body=where.extra_body,
        headers=where.header,
        loras=where.lora,
        replicas=tuple(target_at(url).url for url in where.urls[1:]),
        ca_bundle=where.ca_bundle,
        insecure=where.insecure,
    )


_CONTROL = re.compile(r"[\x00-\x08\x0a-\x1f\x7f]")
"""Characters that no header may have."""


def check_requests(where: ServerOptions) -> None:
    """Extra fields, headers and certificates are the user's errors, reported before anything is started."""
    if where.url is not None and not where.urls:
        raise WorkloadError("--url is empty; expected http://HOST:PORT, or leave it out to start an engine")
    if where.extra_body is not None:
        try:
            extra = json.loads(where.extra_body.reveal())
        except ValueError as error:
            raise WorkloadError(f"--extra-body is not JSON: {error}") from None
        if not isinstance(extra, dict):
            raise WorkloadError(f"--extra-body {where.extra_body.shown}: expected a JSON object like {{}}")
        _check_own(extra)
    if where.ca_bundle is not None and not Path(where.ca_bundle).is_file():
        raise WorkloadError(f"--ca-bundle {where.ca_bundle} is not a file; expected certificates in PEM")
    if where.insecure and where.ca_bundle is not None:
        raise WorkloadError("--insecure trusts any certificate, so --ca-bundle would be ignored; give one")
    if (where.insecure or where.ca_bundle is not None) and not "".join(where.urls).startswith("https:"):
        flag = "--insecure" if where.insecure else "--ca-bundle"
        raise WorkloadError(f"{flag} would be ignored: it applies only to an https --url")
    for header in where.header:
        name, colon, _ = (text := header.reveal()).partition(":")
        if not colon or not name.strip() or not name.strip().isascii() or _CONTROL.search(text):
            raise WorkloadError(f"--header {header.shown!r}: expected 'NAME: VALUE'")
    if where.api_key and _CONTROL.search(where.api_key.reveal()):
        raise WorkloadError(
            f"{API_KEY_VARIABLE} has a line break or another control character; expected a key of one line: "
            "set it again without"
        )
    found = set[str]()
    for url in where.url or ():
        try:
            base = target_at(url.reveal()).url
        except ValueError as error:
            bare = re.fullmatch(r"[\w.-]+(:\d+)?(/[\w./-]*)?", url.shown) and re.search("[:/.]", url.shown)
            told = f"it has no scheme; try --url http://{url.shown}" if bare else error
            raise WorkloadError(f"--url {url.shown}: {told}") from None
        if base in found:
            raise WorkloadError(f"--url names {base} twice; expected different replicas: name it once")
        found.add(base)


OWN_FIELDS: Final = {
    name: row["instead"]
    for row in tables_beside(__file__, "own_fields.toml")["fields"]
    for name in row["names"]
}
"""Fields that Burstline sets and measures by, in the words of all engines, and what to do instead."""


def _check_own(extra: Mapping[str, object]) -> None:
    for name, value in extra.items():
        if name in OWN_FIELDS:
            raise WorkloadError(
                f"--extra-body: Burstline sets {name} itself; expected fields that it does not set: "
                f"{OWN_FIELDS[name]}"
            )
        if name in ("parameters", "sampling_params") and isinstance(value, dict):
            _check_own(value)


def choose_engine(where: ServerOptions) -> Engine:
    """The engine named; else what answers at the URL; else vLLM where it is installed and a model named.

    It is asked through the endpoint that was named.
    """
    engine, wanted = ENGINES["reference"], where.endpoint
    if where.engine is not None:
        engine = ENGINES[where.engine]
    elif where.url is not None:
        engine = ENGINES[engine_at(_asking(where)[1]) or "openai"]
    elif where.model is not None and ENGINES["vllm"].installed(where.engine_python) is not None:
        engine = ENGINES["vllm"]
    if wanted in (None, "native", engine.speaks):
        return engine
    return ENGINES[STYLES[wanted] if engine.attach_only else f"{engine.name}+{wanted}"]


def check_where(where: ServerOptions) -> None:
    """A bad engine, URL, port or model is the user's error, reported before anything is started."""
    check_requests(where)
    if where.engine is not None and where.engine not in ENGINES:
        raise WorkloadError(f"unknown engine {where.engine!r}; {hint(where.engine, ENGINES)}")
    if where.url is not None:  # a server that runs already has its settings
        given = [flag_of(name) for name in START if getattr(where, name) is not None]
        given += [flag_of(name) for name in where.settings.asked]
        given += [" ".join(("--", *(word.shown for word in where.engine_args)))] if where.engine_args else []
        if given:
            raise WorkloadError(
                f"{', '.join(given)} would be ignored: --url names a server that already runs; leave out one "
                "or the other"
            )
        return
    check_settings(where.settings)
    what = f"--host {where.host!r}"
    try:
        require_host(where.host)
        if where.port is not None:
            what = f"--port {where.port}"
            require_free_port(where.host, where.port)
    except EngineError as error:
        raise WorkloadError(f"{what}: {error}") from None
    if where.model is not None:
        check_model(where.model, ENGINES.get(where.engine or ""))
    elif (engine := ENGINES.get(where.engine or "")) and not (engine.brings_model or engine.attach_only):
        raise WorkloadError(
            f"--engine {where.engine} needs a model: --model DIR, or a name it knows "
            "(`burstline make-model DIR --like tiny` makes one without a download)"
        )


def check_start(engine: Engine, where: ServerOptions, longest_tok: int) -> None:
    """Failures that are certain before anything is started: no installation, no weights, too long requests.

    `longest_tok` is the longest prompt and output together.
    """
    if where.lora and engine.lora_path is None:
        raise WorkloadError(
            f"--lora {','.join(where.lora)}: {engine.title} cannot select an adapter by request; drop "
            "it, or pass the engine's own field with --extra-body"
        )
    if where.url is not None:
        _check_running(engine, where, longest_tok)
        return
    if engine.attach_only:
        raise WorkloadError(f"--engine {engine.name} needs --url URL: it cannot be started, only attached to")
    if where.model is not None and where.engine is None:
        check_model(where.model, engine)  # now that the engine is known
    if where.container is None and engine.installed(where.engine_python) is None:
        raise EngineError(f"{engine.title} is not installed. {engine.how_to_get}")
    spelled(engine, where)
    folder = Path(where.model or "")
    if where.model is None or not (folder / "config.json").is_file():
        return
    if engine.needs_weights and engine.lacks_weights(folder):
        kinds = ", ".join(f"*.{kind}" for kind in engine.weight_files)
        flag = "--format gguf" if engine.weight_files == ("gguf",) else "--weights"
        raise WorkloadError(
            f"--model {where.model} holds no weights ({kinds}), which {engine.title} needs; "
            f"`burstline make-model {shlex.quote(f'{folder}-random')} --like {shlex.quote(str(folder))} "
            f"{flag}` makes one that has random ones"
        )
    limit = where.settings.max_model_len or context_limit(folder)
    if limit is not None and longest_tok > limit and not where.engine_args:
        raise WorkloadError(
            f"the longest request has {longest_tok:,} tokens (prompt and output), but "
            f"{'--max-model-len' if where.settings.max_model_len else 'the config.json of its model'} allows "
            f"{limit:,}; ask for fewer"
        )


def _check_running(engine: Engine, where: ServerOptions, longest_tok: int) -> None:
    """Check that the server at the URL is the named engine, and takes prompts and outputs of `longest_tok`.

    No answer is accepted: it may be starting, and waiting for its first token tells.
    """
    target, get = _asking(where)
    meant = engine.name.partition("+")[0]
    answering = engine_at(get, meant) if where.engine is not None else None  # else it is what answered
    if answering is not None and answering != meant and not engine.attach_only:
        other = ENGINES[answering]
        if not other.is_stand_in and not other.attach_only:
            raise WorkloadError(
                f"--engine {meant}: the server at {target.url} is {other.title}; drop --engine, "
                f"or pass --engine {answering}"
            )
    if not longest_tok:
        return
    try:
        limit = engine.identify(get, "").max_model_len
    except Exception:
        return
    if limit is not None and longest_tok > limit:
        raise WorkloadError(
            f"the longest request has {longest_tok:,} tokens (prompt and output), but the server at "
            f"{target.url} allows {limit:,}; ask for fewer, or raise its limit"
        )


def _asking(where: ServerOptions) -> tuple[Target, Get]:
    target = with_options(target_at(where.urls[0], where.model or "", where.api_key), where)
    return target, getter(target, timeout_s=PAGE_TIMEOUT_S, within_s=ATTACH_TIMEOUT_S)


def context_limit(folder: Path) -> int | None:
    """The longest sequence by a model's config.json; None where it does not say, or scales its positions."""
    config = read_json(folder / "config.json")
    limit = config.get("max_position_embeddings")
    return limit if isinstance(limit, int) and not config.get("rope_scaling") else None


def spelled(engine: Engine, where: ServerOptions) -> Spelled:
    """The settings in the engine's words; WorkloadError for what it cannot do."""
    return spell(engine.title, engine.settings, where.settings, [word.shown for word in where.engine_args])


def check_model(model: str, engine: Engine | None = None) -> None:
    """WorkloadError for a model that no server could load: no folder, and no name that the hub may know.

    `engine` is asked what it brings itself. Nothing is looked up outside this machine.
    """
    path = Path(model)
    if engine is not None and engine.brings_model and model == engine.name:
        return
    if path.exists():
        if not ((path / "config.json").is_file() or path.suffix == ".gguf" or any(path.glob("*.gguf"))):
            what = "has no config.json" if path.is_dir() else "is not a folder"
            raise WorkloadError(f"--model {model} {what}; expected a Hugging Face model folder, or a name")
        return
    if path.is_absolute() or not _HUB_NAME.fullmatch(model) or (path.parent.name and path.parent.is_dir()):
        raise WorkloadError(
            f"--model {model} is not a folder; expected a Hugging Face model folder, or a name on the hub as "
            f"ORG/NAME (`burstline make-model {shlex.quote(model)} --like tiny` makes one without a download)"
        )
    if engine is not None and engine.brings_model:
        raise WorkloadError(f"--model {model} is not a folder, and the {engine.title} reads no other model")
    if constants.HF_HUB_OFFLINE and not isinstance(hub.try_to_load_from_cache(model, "config.json"), str):
        raise WorkloadError(
            f"--model {model}: no such folder; if it is a name on the hub, it is not in the local cache and "
            "HF_HUB_OFFLINE is set. Name a model folder, or unset HF_HUB_OFFLINE"
        )


_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(?:/[A-Za-z0-9][\w.-]*)?")
"""A repository name on the hub: ORG/NAME, or the bare name of an old one."""


Serving = Callable[[Engine, ServerOptions, Path, Say], AbstractContextManager[Site]]


@contextmanager
def serving(engine: Engine, where: ServerOptions, run_dir: Path, say: Say) -> Iterator[Site]:
    """A server that is ready; one that we started is ended, with all its descendants, on the way out."""
    if where.url is not None:
        yield _attached(engine, where, say)
        return
    port = where.port or free_port(where.host)
    require_free_port(where.host, port)
    launch = _launch(engine, where, port, run_dir, say)
    if launch.n_cores is not None:
        kept = f"the server runs on {launch.n_cores} of this machine's cores: one is reserved for the client"
        launch = replace(launch, notes=(*launch.notes, kept))
    served_name = launch.served_name or _our_name(engine, where)
    near = EVERYWHERE.get(where.host, where.host)
    near = f"[{near}]" if ":" in near else near
    target = with_options(Target(f"http://{near}:{port}", served_name), where)
    for note in launch.notes:
        say(note)
    with start(launch, run_dir / "server.log") as server, _slow_stop_told(engine, server, say):
        limit_s = where.ready_s or launch.ready_timeout_s
        server.grace_s = min(STARTING_GRACE_S, launch.stop_grace_s)
        startup = wait_ready(engine, server, target, timeout_s=limit_s, progress=_every(10.0, limit_s, say))
        server.grace_s = launch.stop_grace_s
        identity = identified(engine, getter(target, within_s=PROBE_TIMEOUT_S), server.log())
        if launch.fixed is not None:
            identity = identity.completed_by(launch.fixed)
        identity = replace(
            identity, version=identity.version or launch.version, model=identity.model or target.model
        )
        # In a container the engine is no child of ours: its first process has to be asked for.
        pid = engine_pid(find_runtime(), launch.after[-1]) if launch.image else server.keeper_pid
        processes = ServingProcesses(pid) if pid else UNKNOWN
        settings = engine.settings_read(identity, where.settings, spelled(engine, where).sent)
        told = tuple(
            f"{flag_of(each.name)} {each.asked} was requested; {engine.title} uses {each.actual}"
            for each in settings
            if each.differs
        )
        for note in told:
            say(note)
        site = Site(engine, target, identity, server, launch, startup, engine.capabilities, processes)
        probed = _probed(site, say)
        yield replace(probed, settings=settings, notes=probed.notes + told)


@contextmanager
def _slow_stop_told(engine: Engine, server: Server, say: Say) -> Iterator[None]:
    """Stop the server on the way out, and say so where that takes long: some engines drain first."""
    try:
        yield
    finally:
        text = f"Stopping {engine.title}, which may take up to {server.grace_s:.0f} s"
        slow = threading.Timer(SLOW_STOP_S, say, [text])
        slow.daemon = True
        slow.start()
        try:
            server.stop()
        finally:
            slow.cancel()


def _launch(engine: Engine, where: ServerOptions, port: int, run_dir: Path, say: Say) -> Launch:
    words = spelled(engine, where)
    options = LaunchOptions(
        where.model or "",
        where.host,
        port,
        _our_name(engine, where),
        run_dir,
        where.engine_python,
        (*words.arguments, *(word.reveal() for word in where.engine_args)),
        where.n_concurrent,
        where.n_request_tok,
        profile_dir=None if where.profile is None else (run_dir / TRACES).resolve(),
    )
    if where.container is None:
        launch = engine.launch(options)
        return replace(launch, env={**launch.env, **words.environment})
    return launch_in_container(engine, options, where.container, say, find_runtime(), words.environment)


def _our_name(engine: Engine, where: ServerOptions) -> str:
    return Path(where.model or "").name or engine.name


def _attached(engine: Engine, where: ServerOptions, say: Say) -> Site:
    target = with_options(target_at(where.urls[0], where.model or "", where.api_key), where)
    try:
        if not target.model:
            identity = identified(engine, getter(target, within_s=ATTACH_TIMEOUT_S), "")
            # What /v1/models lists is not always the model's own name or folder.
            listed = first_model(identity.raw.get("models")).get("id")
            target = replace(target, model=str(listed or identity.model or "default"))
            if not (listed or identity.model):
                say(f"{target.url} lists no model: requests ask for {target.model!r}; --model names another")
        limit_s = where.ready_s or ATTACH_TIMEOUT_S
        wait = partial(wait_ready, engine, None, timeout_s=limit_s, progress=_every(10.0, limit_s, say))
        startup = wait(target)
    except RefusalError as error:
        if not engine.attach_only or COMPLETION_LIMIT not in str(error):
            raise  # it runs, and its own words say what it lacks
        startup = wait(target := replace(target, takes=(COMPLETION_LIMIT,)))
    except EngineError as error:
        hint = "`burstline engines` looks at the usual ports of this machine, --ready-s S waits longer"
        is_closed = isinstance(error.__cause__, ConnectionError)
        what = f"nothing answers at {target.url} ({error.__cause__})" if is_closed else str(error)
        raise EngineError(
            f"{what}\nExpected a running {engine.title} at --url {target.url}; {hint}"
        ) from error
    identity = identified(engine, getter(target, within_s=PROBE_TIMEOUT_S), "")
    for url in target.replicas:
        _check_replica(engine, replace(target, url=url), identity)
    processes = ServingProcesses.at(target.url, *target.replicas)
    site = _probed(Site(engine, target, identity, None, None, startup, engine.capabilities, processes), say)
    return replace(site, settings=engine.settings_read(identity, Settings(), {}))


def _check_replica(engine: Engine, target: Target, first: Identity) -> None:
    """A replica generates, and is what the first URL is: else a part of the load measures another server."""
    try:
        wait_ready(engine, None, target, timeout_s=ATTACH_TIMEOUT_S)
    except RefusalError:
        raise
    except EngineError as error:
        raise EngineError(f"{error}\nExpected another {engine.title} at --url {target.url}") from error
    identity = identified(engine, getter(target, within_s=PROBE_TIMEOUT_S), "")
    for name in ("version", "model", "max_model_len", "dtype", "kv_tok", "max_num_seqs"):
        one, other = getattr(first, name), getattr(identity, name)
        if one != other:
            raise WorkloadError(
                f"--url {target.url} is not a replica: its {name.replace('_', ' ')} is {other}, that of "
                f"the first URL is {one}"
            )


def _probed(site: Site, say: Say) -> Site:
    notes = site.launch.notes if site.launch else ()
    try:
        target, lacks = site.engine.probe(partial(send, site.target, timeout_s=PROBE_TIMEOUT_S), site.target)
    except EngineError:
        raise
    except Exception as error:  # whatever a server's words can make an adapter do
        raise EngineError(f"{site.engine.title} sent an invalid reply: {error}") from error
    keys = filter(None, (target.api_key, target.login))
    if not all(can_be_known(key.reveal().rpartition(":")[2]) for key in keys):
        lacks += (WITHOUT_MASK,)
    for note in lacks:
        say(note)
    return replace(site, target=target, capabilities=site.engine.capabilities_of(target), notes=notes + lacks)


def _every(period_s: float, limit_s: float, say: Say) -> Callable[[float, str], None]:
    """Report a start's progress once a period, because engines take minutes; each state once."""
    next_s, last = time.monotonic() + period_s, ""

    def told(waited_s: float, state: str) -> None:
        nonlocal next_s, last
        if time.monotonic() >= next_s:
            next_s += period_s
            say(
                f"  {waited_s:.0f} s of at most {limit_s:.0f}: {'still starting' if state == last else state}"
            )
            last = state

    return told
