"""`transformers serve` (5.19 to 5.23, observed on a CPU): OpenAI's completions, with a schema of its own."""

import os
import re
from collections.abc import Sequence
from pathlib import Path

import orjson
import psutil

from burstline.errors import tables_beside
from burstline.servers.host.installation import Installation, PackagedEngine
from burstline.servers.host.kernel import memory_limit, threads_for_server
from burstline.servers.identity import Capabilities, Identity, Sign
from burstline.servers.introspection import logged, option_of
from burstline.servers.launch import Launch, LaunchOptions
from burstline.servers.messages import Call, EngineError, Get, Target
from burstline.servers.openai import post
from burstline.servers.settings import spellings
from burstline.workloads.request import Request

PYTHON_VARIABLE = "BURSTLINE_TRANSFORMERS_PYTHON"

_TABLES = tables_beside(__file__, "transformers_serve.toml")
_BATCHING = ("--continuous-batching", "--no-continuous-batching")
GPUS = ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")
_NEEDS = ("accelerate", "fastapi", "openai", "torch", "uvicorn")


class TransformersServe(PackagedEngine):
    """Starts `transformers serve` with continuous batching, speaks `/v1/completions` with text."""

    name = "transformers"
    title = "transformers serve"
    variable = PYTHON_VARIABLE
    distributions = ("transformers", *_NEEDS)
    capabilities = Capabilities(
        token_id_prompts=False, prefix_cache_control=False, per_event_tok="no", queue_depth=False
    )
    # /v1/models lists the Hugging Face cache, not what is loaded, and fails where there is none.
    speaks = "completions"
    metrics_path: str | None = None
    default_port: int | None = 8000
    needs_weights = True
    one_sampling_unless = "--no-continuous-batching"
    settings = spellings(_TABLES["settings"])
    lora_path: Sequence[str] | None = None
    signs: Sequence[Sign] = (Sign("/openapi.json", b'"/load_model"'),)
    cause = re.compile(r"^(?:[\w.]*(?:Error|Exception)\b: .+|ERROR: +\[Errno .+|Error: .+)", re.MULTILINE)
    last_cause = True
    how_to_get = _TABLES["how_to_get"].format(variable=PYTHON_VARIABLE)

    def find(self, python: str | None) -> Installation | None:
        found = super().find(python)
        if found and (missing := [name for name in _NEEDS if name not in found.versions]):
            raise EngineError(f"{self.title} needs {', '.join(missing)} in {found.python}. {self.how_to_get}")
        return found

    def launch(self, options: LaunchOptions) -> Launch:
        found = self.installation(options)
        assert found is not None  # it has no image
        extra = options.extra_args
        argv = (
            *(found.python, str(found.scripts / "transformers"), "serve", options.model),
            *("--host", options.host, "--port", str(options.port)),
            # Without it requests run one at a time.
            *(() if option_of(extra, *_BATCHING) else ("--continuous-batching",)),
            *extra,
        )
        notes = []
        bound = option_of(extra, "--cb-max-memory-percent", "--cb-num-blocks")
        if not bound and not any(map(os.path.exists, GPUS)):
            # By default it takes nearly all of the machine's memory for its KV cache.
            memory = psutil.virtual_memory()
            share = 0.5 * min(memory.available, memory_limit() or memory.available) / memory.total
            argv = (*argv, "--cb-max-memory-percent", f"{share:.3f}")
            notes.append(_TABLES["notes"]["kv_cache"].format(share=share))
        offline = Path(options.model).is_dir() and "HF_HUB_OFFLINE" not in os.environ
        return Launch(
            argv,
            {"HF_HUB_OFFLINE": "1"} if offline else {},
            stop_grace_s=15.0,
            n_cores=threads_for_server(),
            notes=tuple(notes),
            scripts=found.scripts,
            served_name=options.model,
            version=found.versions["transformers"],
        )

    def encode(self, request: Request, target: Target) -> Call:
        """Fields that OpenAI's schema lacks are refused: lengths are forced by a whole generation config."""
        if request.prompt_text is None:
            raise EngineError("transformers serve accepts only text, and this prompt is token ids")
        sampling = request.sampling
        config: dict[str, object] = {"max_new_tokens": request.n_output_tok, "do_sample": False}
        fields = {"model": target.model, "prompt": request.prompt_text, "stream": True}
        if request.ignore_eos:
            config["eos_token_id"] = -1  # null means the model's own, or the first request's
        if sampling.temperature > 0:
            config |= {"do_sample": True, "temperature": sampling.temperature, "top_p": sampling.top_p}
            fields["seed"] = sampling.seed
        fields["generation_config"] = orjson.dumps(config).decode()
        return post(target, "/v1/completions", fields)

    def identify(self, get: Get, log: str) -> Identity:
        del get  # it has no path that tells anything of the loaded model
        return Identity(engine=self.name, dtype=logged(log, r"dtype[=: ]+(?:torch\.)?(\w+)"))
