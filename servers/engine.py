"""What an engine is: the class that every adapter subclasses, and the values that cross it.

An adapter is one file of pure functions: it says *how* its engine is launched, probed, asked, read and
stopped; `servers/host/` and `loadgen/` do the I/O. Nothing here opens a socket, a file or a clock.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from enum import IntEnum
from pathlib import Path
from urllib.parse import unquote, urlsplit

from servers.redact import learn, printable, redacted
from servers.settings import Setting, Settings, Spelling, plain
from workloads.request import Request


class EngineError(RuntimeError):
    """The server failed us (exit code 5): what happened, its own last words, what to try.

    Its text is printable and without secrets, whatever a server has put into it.
    """

    def __init__(self, text: object = "") -> None:
        super().__init__(printable(redacted(str(text))))


@dataclass(frozen=True, slots=True)
class Read:
    """One read of a socket: when our code had it and when the kernel had it.

    Both stamps are ns on the monotonic clock, counted from the run's start. `kernel_ns` is the receive stamp
    of the last segment in the read (SO_TIMESTAMPNS), None where the transport gives none (TLS, no Linux).
    """

    at_ns: int
    kernel_ns: int | None
    data: bytes


class Kind(IntEnum):
    """What an event of a stream carries. Only ANSWER, REASONING and TOOL events carry tokens.

    EMPTY has no text and no count: it may hold a token whose UTF-8 is not complete yet, or nothing.
    """

    ROLE = 0
    REASONING = 1
    ANSWER = 2
    TOOL = 3
    USAGE = 4
    FINISH = 5
    ERROR = 6
    EMPTY = 7


@dataclass(slots=True)
class Event:
    """One decoded event of a reply.

    `end` is the offset just past the event's last byte in the body: a caller that knows when that byte was
    read knows when the event arrived, so decoding needs no clock and no split of the stream can change it.
    `n_tok` is how many generated tokens the event carries; None where the engine does not say per event.
    """

    end: int
    kind: Kind
    n_tok: int | None


@dataclass(frozen=True, slots=True)
class HttpReply:
    """A whole HTTP reply with the transfer coding taken off. Header names are lower case.

    `complete` is False where the body ended before its framing said so.
    """

    status: int
    headers: Mapping[str, str]
    body: bytes
    complete: bool = True


@dataclass(frozen=True, slots=True)
class ServerTimes:
    """What a server says of the time it took for one request, by its own clock, in seconds.

    None where it does not say. `queue_s` is how long the request waited in the scheduler's queue, `prefill_s`
    from the first forward pass of its prompt to the end of the last, `first_token_s` from the request's
    receipt until its first token left the server: what the network and the client add to it makes TTFT.
    """

    queue_s: float | None = None
    prefill_s: float | None = None
    first_token_s: float | None = None


@dataclass(frozen=True, slots=True)
class Reply:
    """What an engine answered to one request, decoded.

    Counts are the server's own, None where it gave none: `n_output_ids` counts token ids that came
    back (the most trusted), `n_output_usage` is the usage block's figure. `terminated` says that the
    dialect's own end was seen (`[DONE]`, `finished: true`, a final event with details). `error` is the
    server's message where it sent one, in whatever status. `text` is what was generated, to count its
    tokens: None where the server did, or where it is not all text. `overshoots`: the server goes
    on beyond the asked length by its own rules; what is beyond is no part of the request. `overloaded`: it
    refused because it has too many requests.
    """

    events: Sequence[Event]
    n_prompt_tok: int | None = None
    n_output_ids: int | None = None
    n_output_usage: int | None = None
    n_cached_tok: int | None = None
    finish_reason: str | None = None
    terminated: bool = False
    error: str | None = None
    text: str | None = None
    times: ServerTimes | None = None
    overshoots: bool = False
    overloaded: bool = False


@dataclass(frozen=True, slots=True)
class ReplyContent:
    """What a reply said, for a conversation to go on with: token ids where they came back, and the text."""

    text: str
    ids: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class Call:
    """One HTTP request to be sent. Host and Content-Length are the wire's affair."""

    method: str
    path: str
    body: bytes = b""
    headers: tuple[tuple[str, str], ...] = (("content-type", "application/json"),)


@dataclass(frozen=True, slots=True)
class Target:
    """Where requests go and under which name: `url` is scheme://host:port, with a path prefix if any.

    `url` holds no secret: `login` is the "user:password" that stood in the user's URL, `api_key` comes from
    the environment.

    `extra_body` is a JSON object laid over each request's body, `headers` go with each request, `loras` are
    adapters that requests name in turn. `replicas` are further base URLs of the same server, one for each
    load driver in turn: requests take turns, or with `url_by` "session" those with a common beginning go to
    one URL. `ca_bundle` is a file of certificates to trust besides, `insecure` trusts any.

    `takes` names the extras that this server was seen to take; only adapters that probe for them look at it.
    """

    url: str
    model: str
    api_key: str | None = field(default=None, repr=False)
    takes: tuple[str, ...] = ()
    login: str | None = field(default=None, repr=False)
    extra_body: str | None = None
    headers: tuple[tuple[str, str], ...] = field(default=(), repr=False)
    loras: tuple[str, ...] = ()
    replicas: tuple[str, ...] = ()
    url_by: str = "request"
    ca_bundle: str | None = None
    insecure: bool = False


def target_at(url: str, model: str = "", api_key: str | None = None) -> Target:
    """The target that a user's URL names, given with or without `/v1`; its login is taken out of it.

    Raises ValueError, which never quotes the URL, where it is not scheme://[user:password@]host[:port][/path].
    """
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError:
        host = None
    if not host or parts.scheme not in ("http", "https"):
        raise ValueError(
            "expected something like http://127.0.0.1:8000 (special characters of a password as %XX)"
        )
    if parts.query or parts.fragment:
        raise ValueError("expected no ? or # in a base URL; an API key belongs into the environment")
    login = None
    if parts.username is not None:
        login = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
        learn(login, unquote(parts.password or ""), parts.password)
    name = f"[{host}]" if ":" in host else host
    path = parts.path.rstrip("/").removesuffix("/v1").rstrip("/")
    base = f"{parts.scheme}://{name}{'' if port is None else f':{port}'}{path}"
    return Target(base, model, api_key, login=login)


@dataclass(frozen=True, slots=True)
class Identity:
    """What a server says of itself; None means "not provided", never 0.

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
    kv_dtype: str | None = None
    kv_tok: int | None = None
    kv_block_tok: int | None = None
    kv_bytes: int | None = None
    weight_bytes: int | None = None
    max_num_seqs: int | None = None
    max_batched_tok: int | None = None
    admission_limit: int | None = None
    max_input_tok: int | None = None
    quantization: str | None = None
    chunked_prefill: bool | None = None
    cuda_graphs: str | None = None
    attention: str | None = None
    system: str | None = None
    pipeline_parallel: int | None = None
    data_parallel: int | None = None
    expert_parallel: bool | None = None
    memory_fraction: float | None = None
    vocab_size: int | None = None
    prefix_caching: bool | None = None
    tensor_parallel: int | None = None
    raw: Mapping[str, object] = field(default_factory=dict)

    def completed_by(self, other: "Identity") -> "Identity":
        """This, and what `other` says where this says nothing."""
        own = {f.name: getattr(self, f.name) for f in fields(self)}
        return replace(other, **{name: value for name, value in own.items() if value is not None})

    def __post_init__(self) -> None:
        # Read from a server's JSON: what is not of its type was not provided.
        for name, kind in _IDENTITY_TYPES.items():
            value = getattr(self, name)
            if kind is str and isinstance(value, str):
                object.__setattr__(self, name, printable(value, 500))
            elif type(value) is not kind or (isinstance(value, int) and not 0 <= value < 2**63):
                object.__setattr__(self, name, None)


_IDENTITY_TYPES: Mapping[str, type] = {
    **dict.fromkeys(("version", "model", "dtype", "kv_dtype"), str),
    **dict.fromkeys(("max_model_len", "kv_tok", "kv_block_tok", "kv_bytes", "weight_bytes"), int),
    **dict.fromkeys(("max_num_seqs", "max_batched_tok", "vocab_size", "tensor_parallel"), int),
    "prefix_caching": bool,
}


@dataclass(frozen=True, slots=True)
class Gauges:
    """An engine's own gauges under common names; None means "not provided", never 0.

    `kv_used_fraction` is 0..1; the four after it are counters since the server's start, in tokens but the
    first. `latencies` are the engine's own histograms of "ttft", "itl" and "e2e", seconds, also since its
    start: `ttft_le_0.5` so many were at most, `ttft_count` in all, `ttft_sum` together.
    """

    running: float | None = None
    waiting: float | None = None
    kv_used_fraction: float | None = None
    preemptions: float | None = None
    prefix_hit_tokens: float | None = None
    prompt_tokens: float | None = None
    generation_tokens: float | None = None
    latencies: Mapping[str, float] | None = None


@dataclass(frozen=True, slots=True)
class Capabilities:
    """One row of the capability matrix: what fairness depends on.

    `per_event_tok` names what counts an event's tokens: "ids", "usage", "one-per-event" or "no".
    """

    token_id_prompts: bool
    forced_output_length: bool
    prefix_cache_control: bool
    per_event_tok: str
    queue_depth: bool
    graceful_overload: bool


@dataclass(frozen=True, slots=True)
class Image:
    """An engine's container image, pinned, and what its container needs besides a port and the model.

    `shm` is the size of its shared memory, `flags` are further ones of `docker run`.
    """

    name: str
    gpu: bool = True
    shm: str = "16g"
    flags: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class LaunchOptions:
    """What the user asks of a server that we start. `model` is a folder or a name the engine knows.

    `n_concurrent` is how many requests will be there at once, `n_request_tok` how many tokens the longest
    has, prompt and answer together; None where unknown. With `image` the command is to run inside that
    image, which has the model and `run_dir` at the same paths.
    """

    model: str
    host: str
    port: int
    served_name: str
    run_dir: Path
    python: str | None = None
    extra_args: tuple[str, ...] = ()
    n_concurrent: int | None = None
    n_request_tok: int | None = None
    image: str | None = None


@dataclass(frozen=True, slots=True)
class Launch:
    """How to start a server as a local process.

    `env` is laid over ours. `ready_timeout_s` bounds the start, `stop_grace_s` is how long it may take from
    SIGTERM to its end before what is left of its process tree is killed; `after` is a command to run then.
    `leftovers` are globs of what a killed engine leaves in shared memory and the like, where `{id}` stands
    for what the pattern `leftover_id` finds in the log: the engine's own name for itself.
    `n_cores` keeps all of the server's processes to the first so many cores; None: they may use each.
    `scripts` is the folder of the environment's commands, put first on the PATH; None: where `argv[0]` lies.
    `notes` says, for the user's eyes, what the adapter decided by itself. `served_name` is what the engine
    calls the model where it does not take our name for it, `version` that of the installed package, `fixed`
    what the command settles and the server never says of itself. In a container, `image` and `image_digest`
    say which.
    """

    argv: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    ready_timeout_s: float = 600.0
    stop_grace_s: float = 30.0
    step_log: Path | None = None
    n_cores: int | None = None
    scripts: Path | None = None
    notes: tuple[str, ...] = ()
    after: tuple[str, ...] = ()
    leftovers: tuple[str, ...] = ()
    leftover_id: str | None = None
    served_name: str | None = None
    version: str | None = None
    fixed: Identity | None = None
    image: str | None = None
    image_digest: str | None = None


@dataclass(frozen=True, slots=True)
class Stage:
    """One stage of a start, e.g. "loading weights", and when the log first named it, s from the start."""

    name: str
    begin_s: float


Get = Callable[[str], HttpReply]
"""GET a path of the server, e.g. get("/v1/models"); raises EngineError when nothing answers."""

Ask = Callable[[Call], HttpReply]
"""Send one call and wait for its whole reply; raises EngineError when nothing answers."""


@dataclass(frozen=True, slots=True)
class Sign:
    """What tells an engine at a URL: the regular expression `pattern` matches the body of `path`."""

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


@dataclass(frozen=True, slots=True)
class CpuSetup:
    """How an engine computes on this machine's CPU: by numpy, or by torch where `torch_python` has it.

    `dtype` is fp32, bf16 or fp16. `host`: it is the embedded engine, whose host part can be measured too.
    """

    threads: int
    torch_python: str | None
    dtype: str
    host: bool = False


class Engine:
    """One engine: how it is started, probed, identified, asked, read and stopped.

    An adapter is a subclass in a file of its own. Everything that is true of one engine only is a member
    here, with the default that suits most engines; no other module asks for an engine by name.
    """

    name: str
    title: str
    capabilities: Capabilities
    how_to_get: str

    probe_path: str | None = "/health"
    metrics_path: str | None = "/metrics"
    default_port: int | None = None
    image: Image | None = None

    speaks: str = "native"
    """Its own dialect: "native", or one of OpenAI's, "completions" or "chat"."""
    lora_path: Sequence[str] | None = ("model",)
    """Where in a request's body it reads an adapter's name; None: nowhere."""
    is_public: bool = True
    """Shown in lists for users; False for what only tests and the certificate use."""
    tokenizes: bool = False
    """It has a `/tokenize` like vLLM's, or may have one (`servers.protocol.openai.tokenize_call`)."""
    returns_ids: bool = False
    """It sends a reply's token ids where asked (`return_token_ids`): a conversation of ids can go on."""
    attach_only: bool = False
    """Nothing here starts it: it is driven at a URL."""
    brings_model: bool = False
    """It serves a model of its own where none is named."""
    signs: Sequence[Sign] = ()
    """By which it is recognised at a URL; the first engine of the registry with a matching sign wins."""
    stages: Sequence[tuple[str, str]] = (
        (r"(?i)\bdownloading\b", "downloading"),
        (r"(?i)load\w* .*(?:weights|checkpoint|shards|tensors)", "loading weights"),
        (r"(?i)torch\.compile takes|\bcompiling\b|compile range", "compiling"),
        (r"(?i)^(?!.*disabl).*warm(?:ing)? ?up", "warming up"),
        (r"(?i)captur\w* .*graph", "capturing CUDA graphs"),
    )
    """By a regular expression of a log line, what the engine does while it starts, in words for the user."""
    needs_weights: bool = False
    """It cannot start from a folder that has a config.json alone."""
    weight_files: Sequence[str] = ("safetensors", "bin", "pt", "pth", "gguf")
    """By their endings, the files that it reads weights from."""
    admission: Admission | None = None
    """Its scheduler's rules; None where they are unknown, and vLLM V1's are assumed."""
    self_describing: bool = False
    """One device, no quantisation and no speculative decoding: its identity says all of how it computes."""
    settings: Mapping[str, Spelling] = {}
    """How it spells the settings that engines share; what is not here, it cannot be given."""
    start_flags: frozenset[str] = frozenset({"--port"})
    """Flags whose values differ from start to start: ports, sockets, folders."""
    admission_flag: str | None = None
    """Its flag for how many requests it admits."""
    slots_flag: str | None = None
    """Its flag for how many requests it decodes at once."""
    counters_settle_s: float = 0.1
    """How long its counters must not have moved after a load to be complete."""
    load_flags: frozenset[str] = frozenset()
    """Flags that the adapter sets to the number of requests at once."""

    def lacks_weights(self, folder: Path) -> bool:
        """Whether the folder is a model's and holds no weights that this engine can read."""
        if not (folder / "config.json").is_file():
            return False
        return not any(any(folder.glob(f"*.{ending}")) for ending in self.weight_files)

    def installed(self, python: str | None) -> str | None:
        """Its version on this machine ("" where it has none to tell), None where it is not installed."""
        raise NotImplementedError

    def launch(self, options: LaunchOptions) -> Launch:
        """The command that starts the server; EngineError, with how to get it, where it is not installed."""
        raise NotImplementedError

    def ready_call(self, target: Target) -> Call:
        """A request for one real token: a server is ready when it has generated one."""
        raise NotImplementedError

    def ready(self, target: Target, timeout_s: float) -> Reply | None:  # noqa: ARG002
        """One real token, asked for by a client of the engine's own; EngineError where nothing answers.

        None where there is no such client, or it cannot tell what was answered: `ready_call` is sent then.
        """
        return None

    def probe(self, ask: Ask, target: Target) -> tuple[Target, tuple[str, ...]]:  # noqa: ARG002
        """Asked once when the server is ready: the target with the extras it takes, and what it lacks.

        Only an engine whose abilities are unknown beforehand sends anything.
        """
        return target, ()

    def capabilities_of(self, target: Target) -> Capabilities:  # noqa: ARG002
        """What this probed server can do."""
        return self.capabilities

    def identify(self, get: Get, log: str) -> Identity:
        """Who the server is, from its own endpoints and from its log so far ("" when attached)."""
        raise NotImplementedError

    def encode(self, request: Request, target: Target) -> Call:
        """The streaming call that asks for exactly this request."""
        raise NotImplementedError

    def decode(self, reply: HttpReply) -> Reply:
        """What the server answered; never raises: what cannot be understood is an `error`."""
        from servers.protocol.openai import decode_completion

        return decode_completion(reply)

    def reply_content(self, reply: HttpReply) -> ReplyContent | None:
        """What a reply said, for the next turn of a conversation; None where it is an error."""
        from servers.protocol.openai import reply_content

        return reply_content(reply)

    def hang_up_at(self, request: Request) -> int | None:  # noqa: ARG002
        """After how many events the client ends the stream; None where the server itself stops as asked."""
        return None

    def gauges(self, metrics: str) -> Gauges:  # noqa: ARG002
        """The common gauges out of the body of `metrics_path`."""
        return Gauges()

    def doomed(self, log: str) -> str | None:  # noqa: ARG002
        """Why a start has failed although the launcher still lives; None while it may succeed."""
        return None

    def dead(self, log: str) -> str | None:  # noqa: ARG002
        """Why a server that was ready serves no more although its launcher still lives; None while it may."""
        return None

    def root_cause(self, log: str) -> str | None:  # noqa: ARG002
        """The line of a failed server's log that says why it failed, None where no line does."""
        return None

    def model_config(self, identity: Identity) -> Mapping[str, object] | None:  # noqa: ARG002
        """The model's config.json where the server itself tells it."""
        return None

    def settings_read(
        self, identity: Identity, asked: Settings, sent: Mapping[str, str]
    ) -> tuple[Setting, ...]:
        """What was asked, what was sent for it and what the server says it uses, by setting."""
        eager = None if identity.cuda_graphs is None else identity.cuda_graphs == "off"
        actual: dict[str, object] = {
            "max_num_seqs": identity.max_num_seqs,
            "max_num_batched_tokens": identity.max_batched_tok,
            "max_model_len": identity.max_model_len,
            "dtype": identity.dtype,
            "kv_cache_dtype": identity.kv_dtype,
            "quantization": identity.quantization,
            "tensor_parallel_size": identity.tensor_parallel,
            "pipeline_parallel_size": identity.pipeline_parallel,
            "data_parallel_size": identity.data_parallel,
            "expert_parallel": identity.expert_parallel,
            "prefix_cache": identity.prefix_caching,
            "chunked_prefill": identity.chunked_prefill,
            "gpu_memory_utilization": identity.memory_fraction,
            "cuda_graphs": identity.cuda_graphs,
            "enforce_eager": eager,
        }
        wanted = asked.asked
        return tuple(
            Setting(
                name,
                plain(wanted[name]) if name in wanted else None,
                sent.get(name),
                None if value is None else plain(value),
            )
            for name, value in actual.items()
            if value is not None or name in wanted
        )

    def before_load(self, identity: Identity, n_at_once: int, longest_output_tok: int) -> tuple[str, ...]:  # noqa: ARG002
        """What this server will do with such a load that its user should know before it is fired."""
        notes = []
        limit, slots = identity.admission_limit, identity.max_num_seqs
        if limit is not None and n_at_once > limit:
            notes.append(
                f"{self.title} admits {limit:,} requests at once: of {n_at_once:,} it will refuse up to "
                f"{n_at_once - limit:,}. Pass --concurrency {limit}, or raise the server's limit"
                + self._flag_hint(self.admission_flag)
            )
        if not self.capabilities.queue_depth and slots is not None and n_at_once > slots:
            notes.append(
                f"{self.title} has {slots:,} slots: of {n_at_once:,} requests at once up to "
                f"{n_at_once - slots:,} wait in a queue that none of its metrics shows. Pass --concurrency "
                f"{slots}, or raise the server's limit" + self._flag_hint(self.slots_flag)
            )
        return tuple(notes)

    @staticmethod
    def _flag_hint(flag: str | None) -> str:
        return f" ({flag})" if flag else ""

    def admission_of(self, identity: Identity | None) -> Admission | None:  # noqa: ARG002
        """`admission` of a server that says so much of itself."""
        return self.admission

    def cpu_setup(
        self,
        identity: Identity,  # noqa: ARG002
        argv: Sequence[str],  # noqa: ARG002
        log: str,  # noqa: ARG002
    ) -> CpuSetup | None:
        """How a server that was started here by `argv` computes on the CPU; None where it does not."""
        return None
