"""Hugging Face's text-generation-inference (3.3): facts read in its source; its types are huggingface_hub's.

It takes text only, and has no way over HTTP to ignore the end of text: a folder of links to the model is
served instead, in which no id that can be sampled ends a text.
"""

import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import huggingface_hub as hub

from burstline.errors import tables_beside
from burstline.servers.gauges import means_in
from burstline.servers.host.installation import ProgramEngine
from burstline.servers.host.process import free_port
from burstline.servers.identity import Admission, Capabilities, Identity, Sign
from burstline.servers.introspection import flag, json_at, json_line, logged, number, option_of
from burstline.servers.launch import Image, Launch, LaunchOptions
from burstline.servers.messages import Call, EngineError, Event, Get, Kind, Target
from burstline.servers.openai import post
from burstline.servers.replies import Tally
from burstline.servers.settings import Spelling, spellings
from burstline.workloads.model_files import read_json
from burstline.workloads.request import Request

LAUNCHER_VARIABLE = "BURSTLINE_TGI_LAUNCHER"
LAUNCHER = "text-generation-launcher"
ROUND_TOK = 1024
"""Tokens that a request gets per round; then prompt and reply are queued again as one text."""
DEFAULT_CONCURRENT = 128
"""TGI's own `--max-concurrent-requests`: what exceeds them is refused at once."""
_TABLES = tables_beside(__file__, "tgi.toml")
_NOTES = _TABLES["notes"]


class Tgi(ProgramEngine):
    """Starts `text-generation-launcher`, speaks `/generate_stream` with text."""

    name = "tgi"
    title = "TGI"
    variable = LAUNCHER_VARIABLE
    program = LAUNCHER
    capabilities = Capabilities(
        token_id_prompts=False,
        forced_output_length=False,
        per_event_tok="one-per-event",
        graceful_overload=True,
    )
    own_client = "huggingface_hub"
    default_port: int | None = 3000
    image: Image | None = Image("ghcr.io/huggingface/text-generation-inference:3.3.7", shm="1g")
    signs: Sequence[Sign] = (Sign("/info", rb'"router": ?"text-generation-router"'),)
    admission = Admission(chunked_prefill=False, reserve_output=True, mixed_steps=False)
    start_flags = frozenset(
        {"--port", "--master-port", "--prometheus-port", "--shard-uds-path", "--model-id"}
    )
    needs_weights = True
    lora_path: Sequence[str] | None = ("parameters", "adapter_id")
    settings: Mapping[str, Spelling] = {
        **spellings(_TABLES["settings"]),
        "max_model_len": Spelling(
            ("--max-total-tokens", "--max-input-tokens"),
            # By default prompts may be as long as the context but for one token; with the total alone, half.
            lambda n: ("--max-total-tokens", str(n), "--max-input-tokens", str(int(str(n)) - 1)),
        ),
        "prefix_cache": Spelling((), lambda _: (), lambda on: {"PREFIX_CACHING": "1" if on else "0"}),
        "chunked_prefill": Spelling((), lambda _: (), lambda on: {"PREFILL_CHUNKING": "1" if on else "0"}),
        "cuda_graphs": Spelling(("--cuda-graphs",), lambda n: ("--cuda-graphs", _graph_sizes(int(str(n))))),
    }
    admission_flag = "--max-concurrent-requests"
    load_flags = frozenset({"--max-concurrent-requests"})
    gauge_names = _TABLES["gauge_names"]
    latencies = _TABLES["latencies"]
    means = means_in(_TABLES["means"])
    how_to_get = _TABLES["how_to_get"].format(variable=LAUNCHER_VARIABLE, program=LAUNCHER)

    def launch(self, options: LaunchOptions) -> Launch:
        launcher = self.installation(options)
        model, notes = _endless(options)
        limit, room_notes = _room(options)
        extra = options.extra_args
        master_port = free_port(but=(options.port,))
        prometheus_port = free_port(but=(options.port, master_port))
        socket_path = f"/tmp/tgi-{options.port}"  # noqa: S108
        argv = (
            *((launcher,) if launcher else ()),
            *("--model-id", model, "--hostname", options.host, "--port", str(options.port)),
            # By default these three are the same for every TGI of a machine, and the second one breaks.
            *("--master-port", str(master_port), "--prometheus-port", str(prometheus_port)),
            *("--shard-uds-path", socket_path),
            # By default it would spread over every GPU it sees.
            *(() if option_of(extra, "--num-shard") else ("--num-shard", "1")),
            *limit,
            *_checkpoint_dtype(options),
            *("--usage-stats", "off", "--disable-grammar-support", "--json-output"),
            *extra,
        )
        offline = Path(model).is_dir() and "HF_HUB_OFFLINE" not in os.environ
        return Launch(
            argv,
            {"HF_HUB_OFFLINE": "1"} if offline else {},
            ready_timeout_s=1800.0,
            stop_grace_s=100.0,
            notes=notes + room_notes,
            leftovers=(f"{socket_path}-*",),
        )

    def encode(self, request: Request, target: Target) -> Call:
        """The end of text cannot be ignored: `ignore_eos` has no field, and a request may stop early.

        Sampling fields are left out where they would choose nothing: a temperature of 0 or a top_p of 1 are
        refused. Nothing is truncated: TGI would drop the head of the prompt, and the salt with it.
        """
        if request.prompt_text is None:
            raise EngineError("TGI accepts only text, and this prompt is token ids")
        sampling = request.sampling
        sampled = sampling.temperature > 0
        asked = hub.TextGenerationInputGenerateParameters(
            max_new_tokens=request.n_output_tok,
            details=True,
            do_sample=sampled,
            return_full_text=False,
            temperature=sampling.temperature if sampled else None,
            top_p=sampling.top_p if sampled and sampling.top_p < 1 else None,
            seed=sampling.seed if sampled else None,
        )
        parameters = {name: value for name, value in dict(asked).items() if value is not None}
        return post(target, "/generate_stream", {"inputs": request.prompt_text, "parameters": parameters})

    def before_load(self, identity: Identity, n_at_once: int, longest_output_tok: int) -> tuple[str, ...]:
        notes = super().before_load(identity, n_at_once, longest_output_tok)
        if longest_output_tok <= ROUND_TOK:
            return notes
        rounds = -(-longest_output_tok // ROUND_TOK)
        sizes = {"round": ROUND_TOK, "after": ROUND_TOK + 1, "whole": rounds * ROUND_TOK}
        return (*notes, _NOTES["rounds"].format(longest=longest_output_tok, **sizes))

    def hang_up_at(self, request: Request) -> int | None:
        """Beyond 1,024 tokens the router serves whole rounds of 1,024: nothing stops it at the asked one.

        DEFAULT_GENERATION_LENGTH, router/src/validation.rs and router/src/infer/mod.rs, since 3.2.0.
        """
        return request.n_output_tok if request.n_output_tok > ROUND_TOK else None

    def take(self, tally: Tally, answer: Any, end: int) -> Event:
        """One event, one token; the last one has the totals."""
        if answer["token"] is None:
            return Event(end, Kind.EMPTY, 0)
        tally.overshoots = len(tally.events) >= ROUND_TOK
        if (details := answer.get("details")) is not None:
            tally.finish_reason, tally.n_prompt_tok = details["finish_reason"], details["input_length"]
            tally.n_output_usage, tally.terminated = details["generated_tokens"], True
        return Event(end, Kind.ANSWER, 1)

    def generated(self, answers: Sequence[Any]) -> Sequence[int] | str:
        return [answer["token"]["id"] for answer in answers if answer["token"] is not None]

    def identify(self, get: Get, log: str) -> Identity:
        info, lines = json_at(get, "/info"), "\n".join(_messages(log))
        blocks = re.search(r"KV-cache blocks: (\d+), size: (\d+)", log)
        share = _argument(lines, "cuda_memory_fraction") or ""
        sizes = logged(lines, r"Cuda Graphs are enabled for sizes \[([\d, ]+)\]")
        largest = max(map(int, (sizes or "0").split(",")))
        kv_tok = number(logged(log, r"Setting max batch total tokens to (\d+)"))
        return Identity(
            engine=self.name,
            **{name: info.get(own) for name, own in _TABLES["identity"].items()},
            dtype=_dtype(_argument(lines, "dtype")) or info.get("model_dtype"),  # absent since 3.0
            kv_tok=kv_tok or (int(blocks[1]) * int(blocks[2]) if blocks else None),
            kv_block_tok=int(blocks[2]) if blocks else None,
            # /info does not tell the batch limit: max_concurrent_requests is the one of admission.
            max_num_seqs=number(_argument(lines, "max_batch_size")),
            max_num_batched_tokens=number(
                _argument(lines, "max_batch_prefill_tokens")
                or logged(lines, r"Default `max_batch_prefill_tokens` to (\d+)")
            ),
            quantization=(_argument(lines, "quantize") or "none").lower() if lines else None,
            kv_cache_dtype=_dtype(_argument(lines, "kv_cache_dtype")) or _dtype(_argument(lines, "dtype")),
            chunked_prefill=flag(logged(lines, r"Using prefill chunking = (\w+)")),
            attention=logged(lines, r"Using [Aa]ttention =? ?([\w-]+)"),
            gpu_memory_utilization=float(share) if re.fullmatch(r"[\d.]+", share) else None,
            cuda_graphs=None if sizes is None else f"up to {largest}" if largest else "off",
            system=logged(lines, r"Detected system (\w+)"),
            prefix_cache=flag(logged(lines, r"(?:[Uu]sing p|P)refix caching =? ?(\w+)")),
            tensor_parallel_size=number(_argument(lines, "num_shard")),
            raw={"info": info},
        )

    def doomed(self, log: str) -> str | None:
        """A shard that cannot start; the launcher takes the others down before it ends itself."""
        failed = re.search(r"Shard \d+ (?:failed to start|crashed)|ShardCannotStart|ShardFailed", log)
        return self.root_cause(log) or failed[0] if failed else None

    def dead(self, log: str) -> str | None:
        """A shard that crashed: the launcher lives on for the seconds that it takes to end the others."""
        crashed = re.search(r"Shard \d+ crashed|ShardFailed", log)
        cause = (self.root_cause(log) or "").removeprefix("ERROR ")
        return ": ".join(filter(None, (crashed[0], cause))) if crashed else None

    def root_cause(self, log: str) -> str | None:
        """The last exception of a shard, else a panic, else the first line that is an error."""
        lines = "\n".join(_messages(log))
        errors = re.findall(r"^(?!Error: )[\w.]*(?:Error|Exception)\b: .+$", lines, re.MULTILINE)
        panics = re.findall(r"panicked at .+:\n(.+)", lines)
        other = re.findall(r"^(?:error: |Error: |ERROR )\S.*$", lines, re.MULTILINE)
        return next((found for kind in (errors[-1:], panics, other) for found in kind), None)


def _endless(options: LaunchOptions) -> tuple[str, tuple[str, ...]]:
    """The folder to serve, and what the user must know of it."""
    folder, copy = Path(options.model), options.run_dir / "tgi-model"
    if not (folder / "config.json").is_file():
        return options.model, (_NOTES["may_end_early"].format(model=options.model),)
    unused = endless_copy(folder, copy)
    return str(copy.resolve()), (_NOTES["endless"].format(folder=folder, unused=unused),)


def endless_copy(folder: Path, to: Path) -> int:
    """Make a folder of links to a model that never samples an end of text; return the id that ends one.

    It is the first that the model has no logit for. The original is left as it is.
    """
    unused = read_json(folder / "config.json").get("vocab_size")
    if not isinstance(unused, int):
        raise EngineError(f"{folder / 'config.json'} has no vocab_size; expected a number of token ids")
    to.mkdir(parents=True)
    for entry in folder.resolve().iterdir():
        if entry.name != _GENERATION:
            (to / entry.name).symlink_to(entry)
    config = read_json(folder / _GENERATION) | {"eos_token_id": [unused]}
    (to / _GENERATION).write_text(json.dumps(config, indent=2), "utf-8")
    return unused


_GENERATION = "generation_config.json"


def _checkpoint_dtype(options: LaunchOptions) -> tuple[str, ...]:
    """`--dtype` of the checkpoint: by default TGI serves bfloat16 weights in float16, and does not say so."""
    path = Path(options.model) / "config.json"
    if option_of(options.extra_args, "--dtype", "--quantize") or not path.is_file():
        return ()
    config = read_json(path)
    stored = str(config.get("torch_dtype") or config.get("dtype") or "").removeprefix("torch.")
    return ("--dtype", stored if stored in ("float16", "bfloat16") else "bfloat16")


def _room(options: LaunchOptions) -> tuple[tuple[str, ...], tuple[str, ...]]:
    wanted = options.n_concurrent or 0
    if wanted <= DEFAULT_CONCURRENT or option_of(options.extra_args, "--max-concurrent-requests"):
        return (), ()
    note = _NOTES["admission"].format(wanted=wanted, most=DEFAULT_CONCURRENT)
    return ("--max-concurrent-requests", str(wanted)), (note,)


def _messages(log: str) -> list[str]:
    """The messages of a log, line by line, out of its JSON where it is JSON."""
    lines = []
    for line in log.splitlines():
        level, text = json_line(line) or ("", line)
        lines += [f"ERROR {text}"] if level == "ERROR" else []
        lines += text.splitlines()
    return lines


def _graph_sizes(largest: int) -> str:
    """Powers of two up to the largest batch, as TGI's own default is; "0" captures none."""
    sizes = [1]
    while sizes[-1] * 2 <= largest:
        sizes.append(sizes[-1] * 2)
    return ",".join(map(str, sizes)) if largest else "0"


def _argument(text: str, name: str) -> str | None:
    """An argument's value in the launcher's `Args { ... }`, where it is `Some` over several lines."""
    found = re.search(rf"\b{name}: (?:Some\(\s*)?\"?([\w./-]+)", text)
    return None if found is None or found[1] == "None" else found[1]


_DTYPES = {"fp8e4m3fn": "fp8_e4m3", "fp8e5m2": "fp8_e5m2"}


def _dtype(name: str | None) -> str | None:
    """The launcher prints variants of its own enumeration: `BFloat16`, `Fp8e4m3fn`."""
    return None if name is None else _DTYPES.get(name.lower().replace("_", ""), name.lower())
