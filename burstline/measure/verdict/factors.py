"""The factors in which two runs can differ: engine, version, flags, model, machine.

A comparison varies some of these factors on purpose (`--vary max-num-seqs`); everything else must be equal.
"""

import re
import shlex
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import chain, dropwhile
from typing import Final

from burstline.measure.record.manifest import LoadFacts, Manifest, ServerFacts
from burstline.measure.record.rundir import Run
from burstline.measure.record.verdict import Reason
from burstline.measure.verdict.comparable import NOT_STATED, quantization_of
from burstline.servers.identity import Identity
from burstline.servers.registry import ENGINES
from burstline.servers.settings import EQUAL, SETTINGS, Spelling, plain
from burstline.workloads.options import flag_of
from burstline.workloads.request import WorkloadError

GATED: Final = {name.replace("_", "-"): name for name in ("concurrency", *EQUAL)}
"""The settings that the gate checks on its own, by their factor."""
_FOLLOWING: Final = ("max_model_len", "gpu_memory_utilization", "cuda_graphs")
"""Unless set, these follow from model, device or load: only a set value is a factor."""
_OF_HOST: Final = ("cpu", "cpu-quota", "governor", "smt", "numa-nodes")
_SETTINGS: Final = tuple(name for name in SETTINGS if name not in _FOLLOWING)
DEFAULT: Final = "default"
"""A setting that neither a known command line nor its server states."""


def canonical(name: str) -> str:
    """A factor's one name: `--max_num_seqs`, `max-num-seqs` and so on are the same."""
    return name.strip().lower().lstrip("-").replace("_", "-")


def factors(manifest: Manifest) -> dict[str, str]:
    """Every factor of one run; flags that differ from start to start or follow from the load are none.

    However a setting is spelled among the engine's flags, it is one factor. What the server says of it counts
    before what its command line or its user says.
    """
    engine = ENGINES.get(manifest.engine)
    passing = engine.start_flags | engine.load_flags if engine else ()
    spellings: Mapping[str, Spelling] = engine.settings if engine else {}
    load = manifest.load or LoadFacts()
    identity, server = manifest.identity or Identity(manifest.engine), manifest.server
    argv = server.command if server else ()
    config = manifest.hardware.model_config if manifest.hardware else None
    devices = Counter(device.name for device in manifest.devices)
    warmed = sum(stage.n for stage in load.stages) if manifest.load else None
    known = {
        "engine": manifest.engine,
        "version": identity.version,
        "workload": manifest.title or manifest.workload,
        "model": server.model_name if server else None,
        "devices": ", ".join(f"{n} x {name}" for name, n in devices.items()) or "none",
        **{name: getattr(manifest.host, name.replace("-", "_")) for name in _OF_HOST},
        "cores": manifest.host.cores_allowed or manifest.host.cores,
        "memory-limit": manifest.host.memory_limit_bytes,
        "image": (server.image_digest or server.image) if server else None,
        "placement": None if server is None else ("attached" if server.attached else "same machine"),
        "server-addresses": server.addresses if server else None,
        "prompts": load.prompts,
        # How many bursts an automatic warm-up needs is chance.
        "warm-up": f"bursts of {load.warm_up[0].n}" if load.warm_up else warmed,
        **{canonical(name): _read(getattr(identity, name)) for name in _SETTINGS},
        "quantization": quantization_of(identity, argv or None, config),
    }
    # Some settings go to a server by its environment, or by flags that adapters fit to the load.
    asked = {canonical(row.name): row.asked for row in (server.settings if server else ()) if row.asked}
    models = filter(None, (server.model, server.model_asked, identity.model) if server else ())
    flags = _flags(argv[1:], passing, spellings, {*models})
    defaults = dict.fromkeys(map(canonical, spellings), DEFAULT) if argv else {}
    told = {name: str(value) for name, value in known.items() if value is not None}
    return {**defaults, **asked, **flags, **told}


def _read(value: object) -> str | None:
    """A setting as the server says it; switches are on or off."""
    return plain(value) if isinstance(value, bool) else None if value is None else str(value)


def differing(runs: Sequence[Mapping[str, str]], most_in_flight: float | None = None) -> dict[str, list[str]]:
    """The factors in which runs differ, with each run's value ("not stated" where it has none).

    Of different engines, flags and versions differ anyway and are left out. A limit on the batch that none of
    the runs reached is no difference (`most_in_flight`: the most requests that were in flight at once).
    """
    several = len({run.get("engine") for run in runs}) > 1
    names = dict.fromkeys(name for run in runs for name in run)
    found = {}
    for name in names:
        values = [run.get(name, NOT_STATED) for run in runs]
        known = {value for value in values if value != NOT_STATED and not (several and value == DEFAULT)}
        few = len(known) < 2 and (name in _MAY_BE_UNKNOWN or (several and name != "engine"))
        if few or (several and name not in _SHARED) or len({*values}) < 2:
            continue
        if not {*values} - {NOT_STATED, DEFAULT}:
            continue
        most = most_in_flight if name == "max-num-seqs" else None
        if most and all(limit.isdecimal() and int(limit) >= most for limit in known):
            continue
        found[name] = values
    return found


_OF_THE_HOST: Final = ("governor", "smt", "numa-nodes")
_SHARED: Final = frozenset(
    {"engine", "workload", "model", "devices", "cpu", "cores", "placement", *_OF_THE_HOST, *GATED}
)
"""Factors that mean the same at every engine. The form of prompts and the warm-up follow from the engine."""
_MAY_BE_UNKNOWN: Final = frozenset(
    {*GATED, *map(canonical, _SETTINGS), *_OF_THE_HOST, "server-addresses", "prompts", "warm-up"}
)
"""Some engines and kernels do not report these: only two known values differ."""


_FLAG: Final = re.compile(r"--?[A-Za-z]")


def _flags(
    words: Sequence[str], passing: Collection[str], spellings: Mapping[str, Spelling], models: Collection[str]
) -> dict[str, str]:
    """The flags of a command line by factor, without those whose value names the model.

    Several flags of one setting (a cache's type of keys and of values) are one value.
    """
    flags: dict[str, str] = {}
    for name, value, own in _told(words, spellings):
        if value not in models and own[0].partition("=")[0] not in passing:
            is_setting = name in flags and name.replace("-", "_") in spellings
            flags[name] = f"{flags[name]} {value}" if is_setting else value
    return flags


def _told(
    words: Sequence[str], spellings: Mapping[str, Spelling]
) -> Iterator[tuple[str, str, tuple[str, ...]]]:
    """Each flag of a command line: the setting that it is, else its canonical name; its value; its words.

    A flag without a value is "on", or "off" where it switches its setting off.
    """
    for word, following in zip(words, [*words[1:], ""], strict=False):
        flag, equals, value = word.partition("=")
        if not _FLAG.match(flag):
            continue
        bare = not equals and (not following or bool(_FLAG.match(following)))
        setting, switched = _switched(flag, spellings) if bare else (None, "")
        if setting is None:
            setting = next((name for name, how in spellings.items() if flag in how.flags), None)
        value = value if equals else switched if bare else following
        own = (word,) if equals or bare else (word, following)
        yield canonical(setting or flag), plain(value) if setting else value, own


def _spelt(manifest: Manifest, name: str) -> str:
    """A factor as who started the engine spelt it, after our `--` or in its own command; "" where unknown."""
    engine, server = ENGINES.get(manifest.engine), manifest.server or ServerFacts()
    words = server.command if server.attached else [*dropwhile(lambda word: word != "--", manifest.argv)]
    told = _told(words[1:], engine.settings if engine else {})
    return shlex.join(word for factor, _, own in told if factor == name for word in own)


def is_fitted(manifest: Manifest) -> bool:
    """Whether Burstline fitted the server's batch limit to the load, and no person set it."""
    engine, server = ENGINES.get(manifest.engine), manifest.server or ServerFacts()
    spelling = engine.settings.get("max_num_seqs") if engine and not server.attached else None
    asked = any(row.name == "max_num_seqs" and row.asked for row in server.settings)
    fits = engine and spelling and engine.load_flags & {*spelling.flags} and not asked
    return bool(fits) and not _spelt(manifest, "max-num-seqs")


def how_alike(name: str, value: str, like: Manifest, odd: Manifest) -> str:
    """With which flag `odd` is started like the other run, "" where none is known: our own flag of a setting,
    else as who started one of the two spelt it. No person can drop a flag that Burstline adds."""
    engine, row = ENGINES.get(odd.engine), SETTINGS.get(name.replace("-", "_"))
    spelling, server = engine.settings.get(row.name) if engine and row else None, odd.server or ServerFacts()
    is_set, own = value not in (NOT_STATED, DEFAULT, "none"), _spelt(like, name)
    if row and spelling and spelling.flags and is_set:
        with suppress(ValueError, WorkloadError):
            words = spelling.arguments(row.parse(value))
            if words is not None and not server.attached:
                return f"with {row.flag} {value}"
            own = own or " ".join(words or ())
    if row and not (own or is_set) and any(each.name == row.name and each.asked for each in server.settings):
        return f"without {row.flag}"
    word, own = ("with", own) if own else ("without", "" if is_set else _spelt(odd, name))
    return f"{word} {'' if server.attached else '-- '}{own}" if own else ""


def loads_differ(runs: Sequence[Run]) -> Reason:
    """In what loads that are compared on purpose differ, the flags of their servers for them included."""
    values: dict[str, dict[str, None]] = {}
    for manifest, summary in ((run.manifest, run.summary) for run in runs):
        engine, command = ENGINES.get(manifest.engine), manifest.server.command if manifest.server else ()
        flags = engine.load_flags if engine else ()
        given = (own for *_, own in _told(command[1:], {}) if own[0].partition("=")[0] in flags)
        row = {**manifest.asked.to_json(), "slo": ", ".join(manifest.targets), "salt": "", "workers": 1}
        row |= {"requests": summary.counts["planned"]} if summary else {}
        for key, value in {**row, "flags of the server": shlex.join(chain(*given))}.items():
            values.setdefault(key, {})["none" if value in (None, "") else str(value)] = None
    found = {key: " and ".join(texts) for key, texts in values.items() if len(texts) > 1}
    told = [f"{key if ' ' in key else flag_of(key)} ({texts})" for key, texts in found.items()]
    what = f", {'only ' * (len(told) == 1)}in {', '.join(told)}" if told else ""
    return Reason.of("workload.varied", what=what)


def _switched(flag: str, spellings: Mapping[str, Spelling]) -> tuple[str | None, str]:
    """The setting that a flag alone switches, and how; None and "on" where it switches none."""
    for on in (True, False):
        for name, how in spellings.items():
            with suppress(ValueError):  # a setting that takes numbers
                if how.arguments(on) == (flag,):
                    return name, plain(on)
    return None, plain(True)
