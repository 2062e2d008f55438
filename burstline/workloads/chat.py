"""Chats as text: a model folder's own chat template, rendered as transformers renders it.

Source: transformers 5, utils/chat_template_utils.py (the sandbox, its two options and its helper functions).
"""

import json
import re
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from jinja2 import TemplateError
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from burstline.workloads.data_sets import Message, Template
from burstline.workloads.model_files import read_json, read_text
from burstline.workloads.request import WorkloadError

_SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_TRAINED = re.compile(r"({%[-+]?\s*(?:end)?)generation(?=\s*[-+]?%})")


def template_of(folder: Path) -> Template | None:
    """The chat template of a model's or tokenizer's folder; None where it has none."""
    config = read_json(folder / "tokenizer_config.json")
    other = read_json(folder / "chat_template.json")
    source = read_text(folder / "chat_template.jinja") or (config | other).get("chat_template")
    if isinstance(source, list):  # several, by name
        source = next((row["template"] for row in source if row.get("name") == "default"), None)
    if not isinstance(source, str):
        return None
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
    )
    environment.filters["tojson"] = lambda value, ensure_ascii=False, **more: json.dumps(
        value, ensure_ascii=ensure_ascii, **more
    )
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = lambda form: datetime.now(UTC).strftime(form)
    try:
        # Marks of what a model was trained on, which count only in training: a block like any other.
        template = environment.from_string(_TRAINED.sub(r"\1with", source))
    except TemplateError as error:
        raise WorkloadError(f"{folder}'s chat template is not Jinja: {error}") from None
    tokens = {name: config[name] for name in _SPECIAL if config.get(name)}
    special = {name: str(t.get("content", "") if isinstance(t, dict) else t) for name, t in tokens.items()}

    def rendered(messages: Sequence[Message]) -> str:
        try:
            return template.render(
                messages=messages, tools=None, documents=None, add_generation_prompt=True, **special
            )
        except Exception as error:  # whatever a template does with a chat that it does not expect
            raise WorkloadError(f"{folder}'s chat template refuses a chat: {error}") from None

    return rendered


def _refuse(message: str) -> None:
    raise TemplateError(message)
