"""Kernels of a GPU through torch, in bf16: CUDA graphs, with weights that rotate past its caches."""

from collections.abc import Callable
from typing import Any

Kernel = Callable[[], object]
_COPIES = 6
_MOST_BYTES = 4 << 30


class TorchProbe:
    """One CUDA device, by torch's name for it ("cuda:0"). A kernel here is a graph of `repeats` runs."""

    dtype = "bf16"
    element_bytes = 2
    passes: tuple[str, ...] = ("norm", "act")
    _weights: tuple[tuple[int, int, int], list[Any]] = ((0, 0, 0), [])

    def __init__(self, device: str) -> None:
        import torch

        self._torch: Any = torch
        self._device = torch.device(device)
        self._type = torch.bfloat16
        self._facts: Any = torch.cuda.get_device_properties(self._device)
        self.n_units = int(self._facts.multi_processor_count)
        torch.manual_seed(0)

    @property
    def name(self) -> str:
        return str(self._facts.name)

    @property
    def memory_bytes(self) -> float:
        return float(self._facts.total_memory)

    def product(self, m: int, n: int, k: int, copies: int) -> Kernel:
        copies = max(1, min(max(copies, _COPIES), _MOST_BYTES // (self.element_bytes * n * k)))
        x = self._array(m, k)
        if self._weights[0] != (n, k, copies):  # kept from one number of rows to the next
            self._weights = (n, k, copies), [self._array(n, k) for _ in range(copies)]
        linear = self._torch.nn.functional.linear
        return self._graph([lambda w=w: linear(x, w) for w in self._weights[1]])  # type: ignore[misc]

    def read(self, n_bytes: int) -> Kernel:
        return self._graph([self._array(n_bytes // self.element_bytes).sum])

    def decode(
        self, batch: int, context: int, heads: int, kv_heads: int, dim: int, copies: int = 1
    ) -> Kernel:
        del copies
        return self._attention(batch, 1, context, (heads, kv_heads, dim), causal=False)

    def prefill(self, tok: int, heads: int, kv_heads: int, dim: int) -> Kernel:
        return self._attention(1, tok, tok, (heads, kv_heads, dim), causal=True)

    def norm(self, rows: int, width: int) -> Kernel:
        x, more, weight = self._array(rows, width), self._array(rows, width), self._array(width)
        return self._graph([lambda: self._torch.nn.functional.rms_norm(x + more, (width,), weight)])

    def activation(self, rows: int, width: int) -> Kernel:
        gate, up = self._array(rows, width), self._array(rows, width)
        return self._graph([lambda: self._torch.nn.functional.silu(gate) * up])

    def rope(self, rows: int, heads: int, dim: int) -> Kernel:
        raise NotImplementedError("engines fuse it: nothing in torch stands for it")

    def kv_write(self, rows: int, kv_heads: int, dim: int) -> Kernel:
        raise NotImplementedError("engines fuse it: nothing in torch stands for it")

    def once(self, kernel: Kernel, clock: Callable[[], float]) -> float:
        """Seconds of one run: a graph's time over its runs, by the device's own events."""
        del clock
        begin, end = (self._torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        runs = kernel()
        end.record()
        end.synchronize()
        assert isinstance(runs, int)
        return float(begin.elapsed_time(end)) * 1e-3 / runs

    def _attention(
        self, batch: int, queries: int, context: int, heads: tuple[int, int, int], *, causal: bool
    ) -> Kernel:
        n_heads, kv_heads, dim = heads
        q = self._array(batch, n_heads, queries, dim)
        k, v = (self._array(batch, kv_heads, context, dim) for _ in range(2))
        attend = self._torch.nn.functional.scaled_dot_product_attention
        return self._graph([lambda: attend(q, k, v, is_causal=causal, enable_gqa=n_heads != kv_heads)])

    def _graph(self, runs: list[Kernel]) -> Kernel:
        """A graph of each of `runs`, thrice over; replaying it returns how many runs it holds."""
        torch = self._torch
        side = torch.cuda.Stream(self._device)
        with torch.cuda.stream(side):
            for run in runs:  # warmed up apart from the capture, as torch asks for
                run()
        torch.cuda.current_stream(self._device).wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for run in runs * 3:
                run()

        def replay() -> int:
            graph.replay()
            return 3 * len(runs)

        return replay

    def _array(self, *shape: int) -> Any:
        return self._torch.randn(*shape, device=self._device, dtype=self._type) * 0.01
