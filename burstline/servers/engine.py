"""`Engine`: the base class of every adapter.

An adapter is one file of pure functions: it says *how* its engine is launched, probed, asked, read and
stopped; `servers/host/` and `loadgen/` do the I/O. Nothing here opens a socket, a file or a clock.
"""

import re
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from burstline.errors import tables_beside
from burstline.servers.gauges import Gauges, Mean, gauges_in
from burstline.servers.identity import Admission, Capabilities, Identity, Sign
from burstline.servers.launch import Image, Launch, LaunchOptions
from burstline.servers.messages import Ask, Call, Event, Get, HttpReply, Reply, Target
from burstline.servers.openai import encode_completion, generated, take
from burstline.servers.replies import Tally, decode_reply
from burstline.servers.settings import SETTINGS, Setting, Settings, Spelling, plain
from burstline.workloads.request import Request

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_TABLES = tables_beside(__file__, "engine.toml")


@dataclass(frozen=True, slots=True)
class Profiler:
    """An engine's own profiler, which writes PyTorch's traces.

    `body` is that of /start_profile, for a folder and a number of steps after which it stops by itself;
    `flag` says how the server must be started for it to be there.
    """

    body: Callable[[Path, int], Mapping[str, object]]
    flag: str


class Engine:
    """One engine: how it is started, probed, identified, asked, read and stopped.

    An adapter is a subclass in a file of its own. Everything that is true of one engine only is a member
    here, with the default that suits most engines; no other module asks for an engine by name.
    """

    name: str
    title: str
    capabilities: Capabilities = Capabilities()
    how_to_get: str

    probe_path: str | None = "/health"
    metrics_path: str | None = "/metrics"
    default_port: int | None = None
    image: Image | None = None

    speaks: str = "native"
    """Its own dialect: "native", or one of OpenAI's, "completions" or "chat"."""
    extra_fields: Mapping[str, object] = {}
    """What a completion asks it for besides OpenAI's own fields."""
    own_client: str | None = None
    """The package with a client for its own dialect, which an audit uses as a second reader."""
    index_header: str | None = None
    """The header in which each request names its index in the plan."""
    lora_path: Sequence[str] | None = ("model",)
    """Where in a request's body it reads an adapter's name; None: nowhere."""
    is_stand_in: bool = False
    """It may be asked as any other engine, and answers as that one."""
    tokenizes: bool = False
    """It has a `/tokenize` like vLLM's, or may have one (`tokenize_call` of `openai.py`)."""
    returns_ids: bool = False
    """It sends a reply's token ids where asked (`return_token_ids`): a conversation of ids can go on."""
    attach_only: bool = False
    """Nothing here starts it: it is driven at a URL."""
    brings_model: bool = False
    """It serves a model of its own where none is named."""
    signs: Sequence[Sign] = ()
    """By which it is recognised at a URL; the first engine of the registry with a matching sign wins."""
    stages: Sequence[tuple[str, str]] = _TABLES["stages"]
    """By a regular expression of a log line, what the engine does while it starts, in words for the user."""
    one_sampling_unless: str | None = None
    """Without this flag it samples all requests as its first, the greedy one for readiness."""
    needs_weights: bool = False
    """It cannot start from a folder that has a config.json alone."""
    weight_files: Sequence[str] = ("safetensors", "bin", "pt", "pth", "gguf")
    """By their endings, the files that it reads weights from."""
    profiler: Profiler | None = None
    """Its own profiler, as far as a client can turn it on."""
    admission: Admission | None = None
    """Its scheduler's rules; None where they are unknown, and vLLM V1's are assumed."""
    names_early: bool = False
    """Its prefix cache finds a prompt's blocks once the prompt is scheduled, others once it is computed."""
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
    gauge_names: Mapping[str, Sequence[str]] = {}
    """By the name of a field of `Gauges`, its own names for it in the body of `metrics_path`."""
    latencies: Mapping[str, str] = {}
    """By what they measure (`Gauges.latencies`), its histograms."""
    means: Mapping[str, Mean] = {}
    """By name, what else it counts of which the mean tells."""
    cause: re.Pattern[str] | None = None
    """A line of its log that says why it failed, or the group of it that does.

    It must not begin anywhere in a line: that takes a minute for a line of 80,000 characters.
    """
    last_cause: bool = False
    """Of several such lines the last says why; else those after the first only say that it failed."""

    def lacks_weights(self, folder: Path) -> bool:
        """Whether the folder is a model's and holds no weights that this engine can read."""
        if not (folder / "config.json").is_file():
            return False
        return not any(any(folder.glob(f"*.{ending}")) for ending in self.weight_files)

    def installed(self, python: str | None) -> str | None:  # noqa: ARG002
        """Its version on this machine ("" where it has none to tell), None where it is not installed.

        One that is found in no other way is a part of Burstline, or is only attached to.
        """
        return None if self.attach_only else ""

    def launch(self, options: LaunchOptions) -> Launch:
        """The command that starts the server; EngineError, with how to get it, where it is not installed."""
        raise NotImplementedError

    def ready_call(self, target: Target) -> Call:
        """A request for one real token: a server is ready when it has generated one."""
        if self.capabilities.token_id_prompts:
            return self.encode(Request(0, array("I", [10, 11, 12]), None, 3, 1), target)
        return self.encode(Request(0, None, "Hello", 1, 1), target)

    def probe(self, ask: Ask, target: Target) -> tuple[Target, tuple[str, ...]]:  # noqa: ARG002
        """Asked once when the server is ready: the target with the extras it takes, and what it lacks.

        Only an engine whose abilities are unknown beforehand sends anything.
        """
        return target, ()

    def capabilities_of(self, target: Target) -> Capabilities:  # noqa: ARG002
        return self.capabilities

    def identify(self, get: Get, log: str) -> Identity:
        """Who the server is, from its own endpoints and from its log so far ("" when attached)."""
        raise NotImplementedError

    def encode(self, request: Request, target: Target) -> Call:
        """The streaming call that asks for exactly this request: OpenAI's completion, unless overridden."""
        return encode_completion(request, target, extra=self.extra_fields)

    def decode(self, reply: HttpReply) -> Reply:
        """Decode the server's reply; never raises: an invalid reply has an `error`."""
        return decode_reply(reply, self.take)

    def take(self, tally: Tally, answer: Any, end: int) -> Event:
        """One JSON value of a reply, which ends at an offset of the body: an event, added to the tally.

        Raises what plain look-ups raise where it is no value of this engine's.
        """
        return take(tally, answer, end)

    def generated(self, answers: Sequence[Any]) -> Sequence[int] | str:
        """What the JSON values of a whole reply say: token ids where they came, else the text."""
        return generated(answers)

    def tokenizer(self, identity: Identity) -> "Tokenizer | None":  # noqa: ARG002
        """The tokenizer of a model that the engine brings itself, where no file has one."""
        return None

    def hang_up_at(self, request: Request) -> int | None:  # noqa: ARG002
        """After how many events the client ends the stream; None where the server itself stops as asked."""
        return None

    def gauges(self, metrics: str) -> Gauges:
        return gauges_in(metrics, self.gauge_names, self.latencies, self.means)

    def doomed(self, log: str) -> str | None:  # noqa: ARG002
        """Why a start has failed although the launcher still lives; None while it may succeed."""
        return None

    def dead(self, log: str) -> str | None:  # noqa: ARG002
        """Why a server that was ready serves no more although its launcher still lives; None while it may."""
        return None

    def root_cause(self, log: str) -> str | None:
        """The line of a failed server's log that says why it failed, None where no line does."""
        found = [each[each.lastindex or 0] for each in self.cause.finditer(log)] if self.cause else []
        return found[-1 if self.last_cause else 0].strip() if found else None

    def model_config(self, identity: Identity) -> Mapping[str, object] | None:  # noqa: ARG002
        """The model's config.json where the server itself tells it."""
        return None

    def settings_read(
        self, identity: Identity, asked: Settings, sent: Mapping[str, str]
    ) -> tuple[Setting, ...]:
        """Each setting as requested, as sent, and as used by the server."""
        actual = {name: getattr(identity, name) for name in SETTINGS}
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
        """Notices about this load at this server, printed before it is sent."""
        slots = None if self.capabilities.queue_depth else identity.max_num_seqs
        told = _TABLES["limits"]
        refused = (identity.admission_limit, told["refused"], self.admission_flag)
        queued = (slots, told["queued"], self.slots_flag)
        return tuple(
            f"{self.title} {text.format(most=most)}. Pass "
            f"--concurrency {most}, or raise the server's limit{f' ({flag})' if flag else ''}"
            for most, text, flag in (refused, queued)
            if most is not None and n_at_once > most
        )

    def admission_of(self, identity: Identity | None) -> Admission | None:  # noqa: ARG002
        """`admission` of a server that says so much of itself."""
        return self.admission

    def cores_of(self, identity: Identity) -> int | None:  # noqa: ARG002
        """On how many cores it computes in fp32; None where it does not, or does not say."""
        return None
