"""Kernels in another environment's interpreter: torch as the engine itself has it, measured from here.

The other side needs torch and the standard library alone; the fit stays on this side. One JSON line asks for
a kernel's seconds, one answers.
"""

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from burstline.roofline.calibrate.probe_torch import TorchCpuProbe
from burstline.roofline.errors import RooflineError

# Appended, so that the other environment's own packages come first.
_BOOT = (
    "import sys; sys.path.append(sys.argv[1]); "
    "from burstline.roofline.calibrate.probe_remote import serve; serve(*sys.argv[2:])"
)


@dataclass(frozen=True, slots=True)
class _Asked:
    """A kernel by the probe's method and its arguments; the other side makes it and keeps the last one."""

    method: str
    sizes: tuple[int | bool, ...]

    def __call__(self) -> None:
        raise AssertionError("it runs on the other side only: see RemoteProbe.once")


class RemoteProbe:
    """torch on the CPU, in the environment of `python`, on the last `threads` of this process's cores.

    Raises RooflineError where that interpreter cannot measure.
    """

    def __init__(self, python: str, threads: int, dtype: str) -> None:
        root, self._python = str(Path(__file__).parents[3]), python
        self._child = subprocess.Popen(
            [python, "-c", _BOOT, root, str(threads), dtype],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        facts = self._answer()
        self.dtype, self.n_units = dtype, threads
        self.passes: tuple[str, ...] = ("norm", "act")
        self.element_bytes = int(facts["element_bytes"])
        self.name, self.memory_bytes = str(facts["name"]), float(facts["memory_bytes"])

    def product(self, m: int, n: int, k: int, copies: int) -> _Asked:
        return _Asked("product", (m, n, k, copies))

    def read(self, n_bytes: int) -> _Asked:
        return _Asked("read", (n_bytes,))

    def decode(
        self, batch: int, context: int, heads: int, kv_heads: int, dim: int, copies: int = 1
    ) -> _Asked:
        return _Asked("decode", (batch, context, heads, kv_heads, dim, copies))

    def prefill(self, tok: int, heads: int, kv_heads: int, dim: int) -> _Asked:
        return _Asked("prefill", (tok, heads, kv_heads, dim))

    def norm(self, rows: int, width: int) -> _Asked:
        return _Asked("norm", (rows, width))

    def activation(self, rows: int, width: int) -> _Asked:
        return _Asked("activation", (rows, width))

    def rope(self, rows: int, heads: int, dim: int) -> _Asked:
        return _Asked("rope", (rows, heads, dim))

    def kv_write(self, rows: int, kv_heads: int, dim: int) -> _Asked:
        return _Asked("kv_write", (rows, kv_heads, dim))

    def once(self, kernel: Callable[[], object], clock: Callable[[], float]) -> float:
        """Seconds of one run, by the other side's clock."""
        del clock
        assert isinstance(kernel, _Asked)
        assert self._child.stdin is not None
        self._child.stdin.write(json.dumps([kernel.method, kernel.sizes]) + "\n")
        self._child.stdin.flush()
        return float(self._answer()["seconds"])

    def close(self) -> None:
        """End the other side, so that its CPU time counts among this process's children."""
        self._child.communicate()

    def _answer(self) -> dict[str, Any]:
        assert self._child.stdout is not None
        line = self._child.stdout.readline()
        if not line:
            _, errors = self._child.communicate()
            last = errors.strip().splitlines()[-1:] or ["it ended"]
            raise RooflineError(f"torch cannot be measured by {self._python}: {last[0]}")
        answer: dict[str, Any] = json.loads(line)
        return answer


def serve(threads: str, dtype: str) -> None:
    """The other side: facts first, then the seconds of each kernel asked for, until the input ends."""
    probe = TorchCpuProbe(int(threads), dtype)
    facts = {"name": probe.name, "memory_bytes": probe.memory_bytes, "element_bytes": probe.element_bytes}
    _say(facts)
    asked, kernel = "", None
    for line in sys.stdin:
        if line != asked or kernel is None:
            method, sizes = json.loads(line)
            asked, kernel = line, getattr(probe, method)(*sizes)
        _say({"seconds": probe.once(kernel)})


def _say(answer: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()
