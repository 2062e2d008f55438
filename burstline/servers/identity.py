"""A server's identity and capabilities, as it reports them."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cache
from types import NoneType
from typing import get_args, get_type_hints

from burstline.servers.redact import printable


@dataclass(frozen=True, slots=True)
class Identity:
    """A server's properties as it reports them; None means "not provided", never 0.

    What `Settings` can set has its name here too.
    `kv_tok` is the KV cache's capacity in tokens; `max_num_seqs` how many requests decode at once,
    `admission_limit` how many may be there at once before the server refuses more, `max_input_tok` the
    longest prompt. `attention` is the attention kernel's name, `system` what the engine
    computes on, `raw` the replies it was read from (kept in the manifest).
    """

    engine: str
    version: str | None = None
    model: str | None = None
    max_model_len: int | None = None
    dtype: str | None = None
    kv_cache_dtype: str | None = None
    kv_tok: int | None = None
    kv_block_tok: int | None = None
    kv_bytes: int | None = None
    weight_bytes: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    admission_limit: int | None = None
    max_input_tok: int | None = None
    quantization: str | None = None
    chunked_prefill: bool | None = None
    cuda_graphs: str | None = None
    attention: str | None = None
    system: str | None = None
    pipeline_parallel_size: int | None = None
    data_parallel_size: int | None = None
    expert_parallel: bool | None = None
    gpu_memory_utilization: float | None = None
    vocab_size: int | None = None
    prefix_cache: bool | None = None
    tensor_parallel_size: int | None = None
    raw: Mapping[str, object] = field(default_factory=dict)

    def completed_by(self, other: "Identity") -> "Identity":
        """This, and what `other` says where this says nothing."""
        own = {f.name: getattr(self, f.name) for f in fields(self)}
        return replace(other, **{name: value for name, value in own.items() if value is not None})

    def __post_init__(self) -> None:
        # Read from a server's JSON: what is not of its type was not provided.
        for name, kind in _types().items():
            value = getattr(self, name)
            if kind is str and isinstance(value, str):
                object.__setattr__(self, name, printable(value, 500))
            elif kind is float and type(value) is int:
                object.__setattr__(self, name, float(value))
            elif type(value) is not kind or (isinstance(value, int) and not 0 <= value < 2**63):
                object.__setattr__(self, name, None)


@cache
def _types() -> Mapping[str, type]:
    return {
        name: next(kind for kind in get_args(of) if kind is not NoneType)
        for name, of in get_type_hints(Identity).items()
        if NoneType in get_args(of)
    }


@dataclass(frozen=True, slots=True)
class Capabilities:
    """One row of the capability matrix: what fairness depends on. The defaults are those of most engines.

    `per_event_tok` names what counts an event's tokens: "ids", "usage", "one-per-event" or "no".
    """

    token_id_prompts: bool = True
    forced_output_length: bool = True
    prefix_cache_control: bool = True
    per_event_tok: str = "usage"
    queue_depth: bool = True
    graceful_overload: bool = False


@dataclass(frozen=True, slots=True)
class Sign:
    """How to recognise an engine at a URL: the regular expression `pattern` matches the body of `path`."""

    path: str
    pattern: bytes


@dataclass(frozen=True, slots=True)
class Admission:
    """How an engine lets requests into its batch, for the simulation of its scheduler.

    `chunked_prefill`: a prompt may be computed in parts. `mixed_steps`: a step may compute prompts and
    decode; where it may not, prompts go first. `reserve_output`: a request enters only when the KV cache has
    room for its whole output. `ahead`: a step is scheduled when the one before it begins.
    """

    chunked_prefill: bool = True
    reserve_output: bool = False
    mixed_steps: bool = True
    ahead: bool = False
