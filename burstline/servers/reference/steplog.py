"""The step log: what the engine computed in each step, and when. JSON lines, readable after a kill.

The first line is the header: `schema` (1), `pid`, `gemms` (their names) and all of `/server_info`: `engine`,
`block_size`, `max_num_batched_tokens`, `config` and so on. Then a line a step:

| column | meaning |
|---|---|
| step | counted from 0 |
| start_ns, end_ns | time.monotonic_ns before scheduling, and after the new tokens were chosen |
| cpu_ns | CPU time that the whole server had used at start_ns, of all its threads |
| prefill_tok, decode_tok | tokens computed; decode: one new token of a sequence whose prompt is done |
| new_tok, context_tok | per sequence: tokens computed; tokens the last of them attends to, itself included |
| n_logits | rows of the lm_head GEMM: sequences that got a new token |
| gemm_ns | name -> time inside that GEMM, all layers together: of each core that took part, their mean |
| attention_ns | rotary embedding, KV writes and gathers, scores, softmax, weighted values, all layers |
| rest_ns | end - start less the two above: scheduling, norms, activation, embedding, sampling |
| n_waiting, n_preempted, kv_used_blocks | queue and cache after scheduling; preemptions in this step |
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import orjson

from burstline.servers.host.telemetry import LineFile

SCHEMA = 1


class StepLog:
    """Appends one JSON line at a time to a file begun anew."""

    def __init__(self, path: Path, header: Mapping[str, object]) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"")
        self._file = LineFile(path)
        self.close = self._file.close
        self.write({"schema": SCHEMA, "pid": os.getpid(), **header})

    def write(self, line: Mapping[str, object]) -> None:
        self._file.write(orjson.dumps(line, option=orjson.OPT_APPEND_NEWLINE))


def load_steps(path: Path) -> tuple[dict[str, Any], dict[str, list[Any]]]:
    """The header, and the steps as plain columns of equal length, oldest first; `gemm_ns` is a column a GEMM.

    A torn last line, of a killed server, is left out. Raises ValueError for a log of another schema.
    """
    lines = path.read_bytes().split(b"\n")[:-1]  # what follows the last newline is torn, or nothing
    if not lines:
        raise ValueError(f"{path} is empty: the server ended before its step log began")
    header, *steps = map(orjson.loads, lines)
    if header.get("schema") != SCHEMA:
        raise ValueError(f"{path} has step log schema {header.get('schema')!r}, expected {SCHEMA}")
    for step in steps:
        step.update((f"{name}_ns", ns) for name, ns in step.pop("gemm_ns").items())
    return header, {name: [step[name] for step in steps] for name in (steps[0] if steps else ())}
