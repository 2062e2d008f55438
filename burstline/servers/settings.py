"""Settings shared by all engines, under one name; each adapter translates them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, Self

from burstline.dtypes import FLOAT_NAMES, FLOATS
from burstline.errors import tables_beside
from burstline.workloads.options import flag_of, given, on_or_off, option, options_of
from burstline.workloads.request import WorkloadError

_ROWS: Final = tables_beside(__file__, "settings.toml")


def _setting(name: str, parse: Callable[[str], Any]) -> Any:
    """The option of a row of `settings.toml`."""
    row = _ROWS[name]
    return option(row["help"], parse=parse, metavar=row["metavar"], once=True)


@dataclass(frozen=True, slots=True)
class Settings:
    """The user's settings of an engine that Burstline starts; None keeps the engine's default.

    `Identity` has a field of the same name for what the engine says that it uses. Flags, a suite's keys, the
    settings on the page and what the comparability gate holds equal are made from these rows.
    """

    max_num_seqs: int | None = _setting("max_num_seqs", int)
    max_num_batched_tokens: int | None = _setting("max_num_batched_tokens", int)
    max_model_len: int | None = _setting("max_model_len", int)
    dtype: str | None = _setting("dtype", str)
    kv_cache_dtype: str | None = _setting("kv_cache_dtype", str)
    quantization: str | None = _setting("quantization", str)
    tensor_parallel_size: int | None = _setting("tensor_parallel_size", int)
    pipeline_parallel_size: int | None = _setting("pipeline_parallel_size", int)
    data_parallel_size: int | None = _setting("data_parallel_size", int)
    expert_parallel: bool | None = _setting("expert_parallel", on_or_off)
    prefix_cache: bool | None = _setting("prefix_cache", on_or_off)
    chunked_prefill: bool | None = _setting("chunked_prefill", on_or_off)
    gpu_memory_utilization: float | None = _setting("gpu_memory_utilization", float)
    cuda_graphs: int | None = _setting("cuda_graphs", int)

    @property
    def asked(self) -> dict[str, Any]:
        return {row.name: value for row, value in given(self)}

    def over(self, other: Self) -> Self:
        """These, and those of `other` where nothing is set here."""
        return replace(other, **self.asked)


SETTINGS: Final = options_of(Settings)
"""Every setting's row by name."""
EQUAL: Final[Mapping[str, tuple[str, str]]] = {
    name: tuple(row["equal"]) for name, row in _ROWS.items() if "equal" in row
}
"""The settings that must be equal where engines are compared: the code of the reason, and a title."""


@dataclass(frozen=True, slots=True)
class Spelling:
    """How an engine spells one setting: as arguments, as variables of its environment, or both.

    `flags` are all of its own flags that set it: where a user gave one after `--`, that one wins.
    """

    flags: tuple[str, ...]
    arguments: Callable[[object], tuple[str, ...] | None]
    environment: Callable[[object], Mapping[str, str]] = field(default=lambda _: {})


def spellings(rows: Mapping[str, Any]) -> Mapping[str, Spelling]:
    """By setting how an engine spells it, out of the table `settings` of its TOML file.

    A row is its flags, of which the first is sent with the value, or a table: `flags` that take `words`
    alone, by our names; `flags` with a number, and another flag for `zero`; arguments that switch it `on`
    and `off`, none where that is its default. Else nothing is sent, for any value or the `only` one.
    """
    return {name: _spelling({"flags": row} if isinstance(row, list) else row) for name, row in rows.items()}


def _spelling(row: Mapping[str, Any]) -> Spelling:
    match row:
        case {"flags": [flag, *_] as flags, "words": words}:
            return Spelling(tuple(flags), lambda value: (flag, words[value]) if value in words else None)
        case {"flags": [flag, *_] as flags, "zero": zero}:
            return Spelling((*flags, zero), lambda n: (flag, str(n)) if n else (zero,))
        case {"flags": [flag, *_] as flags}:
            return Spelling(tuple(flags), lambda value: (flag, str(value)))
        case {"on": on, "off": off}:
            own = tuple(word for word in (*on, *off) if word.startswith("-"))
            return Spelling(own, lambda value: tuple(on if value else off))
    return Spelling((), lambda value: () if value == row.get("only", value) else None)


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting of a run: what was asked, what was sent for it, what the engine says that it uses."""

    name: str
    asked: str | None
    sent: str | None
    actual: str | None

    @property
    def differs(self) -> bool:
        """Whether the engine uses another value than was requested; False where no certain value is known."""
        asked, actual = canonical(self.name, self.asked), canonical(self.name, self.actual)
        return None not in (asked, actual) and asked != actual


def plain(value: object) -> str:
    """A value as one word that can be compared: `bf16` is `bfloat16`, 4,096 is 4096, True is on."""
    if isinstance(value, bool):
        return "on" if value else "off"
    word = str(value).lower().removeprefix("torch.")
    return FLOAT_NAMES.get(word, word)


def canonical(name: str, value: str | None) -> str | None:
    """A setting's value as a word to compare: `up to 512` is 512, fp8 is fp8_e4m3; None: no certain value."""
    if value is None:
        return None
    word = plain(value)
    if name == "cuda_graphs":
        word = {"off": "0", "on": "auto"}.get(word, word).removeprefix("up to ")
    elif name == "kv_cache_dtype" and word == "fp8":
        word = "fp8_e4m3"
    elif name == "quantization":  # "_marlin" names the kernel; a GGUF file's own type may be none
        word = word.removesuffix("_marlin")
        word = "none" if word in FLOATS else word
    return None if word == "auto" else word


@dataclass(frozen=True, slots=True)
class Spelled:
    """Settings in an engine's own words: arguments, variables, and by setting what was sent for it."""

    arguments: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    sent: Mapping[str, str] = field(default_factory=dict)


def spell(title: str, spellings: Mapping[str, Spelling], settings: Settings, extra: Sequence[str]) -> Spelled:
    """The settings as an engine takes them; WorkloadError for what it cannot do.

    A flag of the engine's own in `extra` wins over the setting of the same meaning. "auto" is left out where
    the engine has no such word, for it is then the default.
    """
    arguments: list[str] = []
    environment: dict[str, str] = {}
    sent: dict[str, str] = {}
    senders: dict[str, tuple[str, tuple[str, ...]]] = {}
    own = {word.partition("=")[0] for word in extra}
    for name, asked in settings.asked.items():
        value = plain(asked) if name in ("dtype", "kv_cache_dtype") else asked
        spelling = spellings.get(name)
        words = spelling.arguments(value) if spelling else None
        if words is None and value == "auto":
            sent[name] = "its default"
            continue
        if spelling is None or words is None:
            what = f"{flag_of(name)} {plain(value)}"
            raise WorkloadError(f"{title} does not support {what}; drop it, or pass its own flag after --")
        if own & set(spelling.flags):
            continue
        before, same = senders.setdefault(words[0], (name, words)) if words else (name, words)
        if same != words:
            raise WorkloadError(
                f"{title} has one flag, {words[0]}, for {flag_of(before)} {plain(getattr(settings, before))} "
                f"and {flag_of(name)} {plain(value)}; give one"
            )
        if before != name:
            sent[name] = " ".join(words)
            continue
        variables = spelling.environment(value)
        arguments += words
        environment |= variables
        told = (*words, *(f"{key}={word}" for key, word in variables.items()))
        sent[name] = " ".join(told) or "its default"
    return Spelled(tuple(arguments), environment, sent)


def check(settings: Settings) -> None:
    """WorkloadError, naming the flag, for a value that no engine could take."""
    for row in SETTINGS.values():
        least, n = 0 if row.name == "cuda_graphs" else 1, getattr(settings, row.name)
        if row.parse is int and n is not None and n < least:
            raise WorkloadError(f"{row.flag} {n}: expected at least {least}")
    share = settings.gpu_memory_utilization
    if share is not None and not 0 < share <= 1:
        raise WorkloadError(f"--gpu-memory-utilization {share:g}: expected a share above 0, at most 1")
    for name, known in (("dtype", DTYPES), ("kv_cache_dtype", KV_DTYPES)):
        value = getattr(settings, name)
        if value is not None and plain(value) not in known:
            raise WorkloadError(f"{flag_of(name)} {value}: expected one of {', '.join(known)}")


DTYPES = ("auto", *FLOATS)
KV_DTYPES = (*DTYPES, "fp8", "fp8_e4m3", "fp8_e5m2", "int8", "int4", "q8_0", "q4_0")
