"""The contents of manifest.json, written and read through these types. No heavy imports.

Runs from other machines are untrusted input: `Manifest.from_json` checks every type. Top-level keys that this
version does not know are kept (`unknown`); unknown keys further down are refused.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal, Self
from urllib.parse import urlsplit

from burstline.loadgen.capture.drive_report import DriveReport, LostDriver
from burstline.measure.record import typed_json
from burstline.measure.record.typed_json import OPTIONAL
from burstline.servers.identity import Capabilities, Identity
from burstline.servers.launch import StartStage
from burstline.servers.settings import Setting
from burstline.workloads.plan import BLOCK_TOK, N_BURST_OUTPUT
from burstline.workloads.spec import MAX_FAILURES, LoadSpec

SCHEMA: Final = 4
"""Schema of the folder and of every file in it. Any other is refused."""

LOOPBACK: Final = ("127.0.0.1", "localhost", "::1")

Status = Literal["running", "complete", "interrupted", "failed"]
Option = str | int | float | bool | None


@dataclass(frozen=True, slots=True)
class RunClock:
    """The same instant on both clocks, and as ISO 8601: the one reading of the wall clock."""

    wall_ns: int
    monotonic_ns: int
    utc: str


@dataclass(frozen=True, slots=True)
class HostFacts:
    """The client's machine; what is unknown is None.

    `governor` is the kernel's policy for CPU clocks, `smt` whether cores run two threads, `numa_nodes` how
    many memories the machine has; `cpu_quota` (in CPUs) and `memory_limit_bytes` are the control group's.
    """

    platform: str | None = None
    cpu: str | None = None
    cores: int | None = None
    cores_allowed: int | None = None
    memory_bytes: int | None = None
    load_average: tuple[float, ...] = ()
    open_files_limit: tuple[int, ...] = ()
    governor: str | None = None
    smt: bool | None = None
    numa_nodes: int | None = None
    cpu_quota: float | None = field(default=None, metadata=OPTIONAL)
    memory_limit_bytes: int | None = field(default=None, metadata=OPTIONAL)


@dataclass(frozen=True, slots=True)
class GpuFacts:
    """A GPU as its driver describes it; `is_slice` where it is a part of one, such as NVIDIA's MIG."""

    name: str
    memory_bytes: int | None = None
    driver: str | None = None
    is_slice: bool | None = field(default=None, metadata=OPTIONAL)


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """Where the load went. `attached` servers were running already: `env` is not known, and `argv` only where
    their processes could be seen.

    `model` is the served name, `model_asked` what the user named. `ready_s` is from the start to the first
    generated token, `startup_stages` when each stage began that the log names. `env` is laid over the
    client's own. `settings` are what was asked of the engine, what was sent and what it says it uses.
    `addresses` counts what the URLs resolve to: behind several, a balancer or the name's record spreads the
    connections. `n_cores`: it was kept to so many cores of this machine; None: it could use each.
    """

    url: str | None = None
    model: str | None = None
    model_asked: str | None = None
    attached: bool = True
    argv: tuple[str, ...] | None = None
    env: Mapping[str, str] | None = None
    image: str | None = None
    image_digest: str | None = None
    notes: tuple[str, ...] = ()
    ready_s: float | None = None
    startup_stages: tuple[StartStage, ...] = ()
    capabilities: Capabilities | None = None
    settings: tuple[Setting, ...] = ()
    addresses: int | None = None
    n_cores: int | None = field(default=None, metadata=OPTIONAL)

    @property
    def command(self) -> tuple[str, ...]:
        """The engine's own command line: a container's name, ports and mounts differ from start to start."""
        argv = self.argv or ()
        return argv[argv.index(self.image) :] if self.image in argv else argv

    @property
    def model_name(self) -> str:
        """The last part of the served model's name or path."""
        return str(self.model or "unnamed").rstrip("/").rpartition("/")[2]


@dataclass(frozen=True, slots=True)
class HardwareFacts:
    """Input of the roofline: the model's config.json, and how model and device are known.

    `absent` says why one of them is not. `stated` are facts of the engine that a person stated. `held` is
    how many times the bytes that the config.json says the weight files hold, None where that is no other.
    """

    model_config: Mapping[str, Any] | None = field(default=None, metadata=OPTIONAL)
    model_from: str | None = field(default=None, metadata=OPTIONAL)
    device_from: str | None = field(default=None, metadata=OPTIONAL)
    absent: str | None = field(default=None, metadata=OPTIONAL)
    stated: Mapping[str, Option] | None = field(default=None, metadata=OPTIONAL)
    held: float | None = field(default=None, metadata=OPTIONAL)


@dataclass(frozen=True, slots=True)
class StageFacts:
    """Requests sent before the measurement: how many, how many succeeded, and their median E2E latency."""

    name: str
    n: int
    ok: int
    e2e_p50_s: float | None = None


WARM_UP_AGREES: Final = 0.1
"""Two warm-up bursts agree where their median E2E latencies differ by no more than this share."""
WARM_UP_AGREES_S: Final = 0.005
"""Or by so little: small models answer in milliseconds."""


@dataclass(frozen=True, slots=True)
class LoadFacts:
    """Facts of the plan. `dropped` counts rows of a data set or trace that were left out, by reason.

    `expected_cached_fraction` is the share of prompt tokens that an unlimited prefix cache could serve; None
    where replies decide it (sessions). `stages` were sent before the load. `prompts` is the form in which
    they were sent: "ids", or "text" and "chat", which the server must tokenize.
    """

    dropped: Mapping[str, int] = field(default_factory=dict)
    expected_cached_fraction: float | None = None
    stages: tuple[StageFacts, ...] = ()
    prompts: str | None = None

    @property
    def warm_up(self) -> tuple[StageFacts, ...]:
        return tuple(stage for stage in self.stages if stage.name.startswith("warm-up "))

    @property
    def warm_up_agrees(self) -> bool:
        """Whether the last two bursts took equally long: the server has come to its pace for this shape."""
        times = sorted(burst.e2e_p50_s for burst in self.warm_up[-2:] if burst.e2e_p50_s is not None)
        if len(times) < 2:
            return False
        return times[1] - times[0] <= max(WARM_UP_AGREES * times[0], WARM_UP_AGREES_S)

    @property
    def warm_up_sentence(self) -> str:
        bursts, unsettled = self.warm_up, "no two in a row agree: the server may still be warming up"
        times = ", ".join(f"{each.e2e_p50_s:.3g} s" for each in bursts if each.e2e_p50_s is not None)
        end = "the last two agree" if self.warm_up_agrees else unsettled
        what = f"{len(bursts)} bursts of {bursts[0].n}, of at most {N_BURST_OUTPUT} output tokens"
        return f"Warm-up: {what}, median E2E {times or 'unknown'}; {end}."


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """The settings and environment of a run. Sections that the run has not reached yet are None.

    `devices` are the GPUs that serve, `devices_from` says how that is known, or why none is. `asked` is the
    load as it was asked for, `max_failures` the share of requests that may fail; `repeat` is the command that
    sends the same bytes again; `step_log` the header of the engine's own step log; `error` why nothing could
    be sent, or what ended the load; `error_code` is "client-failed" where that was not the server; `ended_s`
    is when a load that had said enough sent its last request. `others_cpu` is the share of this machine's CPU
    that processes of neither client nor server took during the load, by `python (pid 7)`; None if unknown.
    """

    schema: int = SCHEMA
    status: Status = "running"
    pid: int = 0
    engine: str
    workload: str
    clock: RunClock | None = None
    version: str | None = None
    commit: str | None = None
    argv: tuple[str, ...] = ()
    python: str | None = None
    libraries: Mapping[str, str] = field(default_factory=dict)
    host: HostFacts = HostFacts()
    devices: tuple[GpuFacts, ...] = ()
    devices_from: str | None = field(default=None, metadata=OPTIONAL)
    title: str | None = None
    asked: LoadSpec = field(default_factory=LoadSpec)
    targets: tuple[str, ...] = ()
    max_failures: float = MAX_FAILURES
    repeat: str | None = None
    identity: Identity | None = field(default=None, metadata=OPTIONAL)
    server: ServerFacts | None = field(default=None, metadata=OPTIONAL)
    plan_sha256: str | None = field(default=None, metadata=OPTIONAL)
    load: LoadFacts | None = field(default=None, metadata=OPTIONAL)
    drivers: tuple[DriveReport, ...] = ()
    lost: tuple[LostDriver, ...] = ()
    step_log: Mapping[str, Any] | None = field(default=None, metadata=OPTIONAL)
    hardware: HardwareFacts | None = field(default=None, metadata=OPTIONAL)
    error: str | None = field(default=None, metadata=OPTIONAL)
    error_code: str | None = field(default=None, metadata=OPTIONAL)
    ended_s: float | None = field(default=None, metadata=OPTIONAL)
    usd_per_hour: float | None = field(default=None, metadata=OPTIONAL)
    others_cpu: Mapping[str, float] | None = field(default=None, metadata=OPTIONAL)
    unknown: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_probe(self) -> bool:
        """Whether it is a probe of a search, which decides how long it lasts."""
        return self.argv[1:2] == ("limit",)

    @property
    def may_end_early(self) -> bool:
        """Whether more was planned than the load could need: what it did not send was not asked for."""
        goes_by_time = self.asked.concurrency is not None and self.asked.duration_s is not None
        return goes_by_time or self.ended_s is not None

    @property
    def block_tok(self) -> int:
        """Tokens in a block of the KV cache: as the server says, else as most engines have it."""
        return (self.identity.kv_block_tok if self.identity else None) or BLOCK_TOK

    @property
    def server_here(self) -> bool:
        """Whether the server was started on this machine, or seen in a container of it."""
        return self.server is not None and (not self.server.attached or self.server.argv is not None)

    @property
    def on_this_machine(self) -> bool:
        """Whether the server is here as far as is known: started or seen here, or at a loopback address."""
        return self.server is None or self.server_here or urlsplit(str(self.server.url)).hostname in LOOPBACK

    def to_json(self) -> dict[str, Any]:
        row: dict[str, Any] = typed_json.plain(self)
        unknown = row.pop("unknown")
        return {**row, **unknown}

    @classmethod
    def from_json(cls, row: Mapping[str, Any]) -> Self:
        """The manifest; MismatchError, naming the place, where a type is wrong."""
        names = cls.__dataclass_fields__.keys() - {"unknown"}
        unknown = {name: value for name, value in row.items() if name not in names}
        known = {name: value for name, value in row.items() if name in names}
        return typed_json.from_fields(cls, {**known, "unknown": unknown})
