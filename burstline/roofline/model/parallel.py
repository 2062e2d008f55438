"""How a model is distributed over devices, and which distributions are impossible."""

from dataclasses import dataclass

from burstline.errors import RooflineError
from burstline.roofline.model.shapes import Attention, Dense, ModelShape, Moe


@dataclass(frozen=True, slots=True)
class Parallel:
    """Ranks by kind: tensor, pipeline, expert and data parallel.

    `dp` replicas of `tp * pp` devices. Experts are spread over `ep` of the `tp * dp` ranks of a stage; with
    ep = 1 every replica holds all of them, each divided by `tp`.
    """

    tp: int = 1
    pp: int = 1
    ep: int = 1
    dp: int = 1

    @property
    def n_devices(self) -> int:
        return self.tp * self.pp * self.dp

    @property
    def n_for_one_request(self) -> int:
        """Devices that work on one request at most: a replica's, and others' where experts span replicas."""
        return self.tp * self.pp * (self.dp if self.ep > 1 else 1)

    @property
    def moe_tp(self) -> int:
        """By how many ranks each expert is divided."""
        return self.tp if self.ep == 1 else self.tp * self.dp // self.ep


def check_parallel(model: ModelShape, parallel: Parallel) -> None:
    """Raises where the model cannot be divided so."""
    for name, ranks in (("tp", parallel.tp), ("pp", parallel.pp), ("ep", parallel.ep), ("dp", parallel.dp)):
        if ranks < 1:
            raise RooflineError(f"{name} must be at least 1, not {ranks}")
    if parallel.pp > model.n_layers:
        raise RooflineError(f"pp {parallel.pp} is more than the {model.n_layers} layers of {model.name}")
    if (parallel.tp * parallel.dp) % parallel.ep:
        raise RooflineError(
            f"ep {parallel.ep} does not divide tp x dp = {parallel.tp * parallel.dp};"
            " experts are spread over those ranks"
        )
    for layer in model.layers:
        _must_divide(model, parallel.tp, "query heads", layer.attention.n_heads)
        if isinstance(layer.attention, Attention):
            kv_heads = layer.attention.n_kv_heads
            if kv_heads % parallel.tp and parallel.tp % kv_heads:
                raise RooflineError(
                    f"tp {parallel.tp} does not divide the {kv_heads} KV heads of {model.name}"
                )
        if isinstance(layer.ffn, Dense):
            _must_divide(model, parallel.tp, "feed-forward columns", layer.ffn.d_ff)
        else:
            _check_experts(model, layer.ffn, parallel)


def _check_experts(model: ModelShape, moe: Moe, parallel: Parallel) -> None:
    if moe.n_experts % parallel.ep:
        raise RooflineError(f"ep {parallel.ep} does not divide the {moe.n_experts} experts of {model.name}")
    _must_divide(model, parallel.moe_tp, "columns of an expert", moe.d_ff)
    _must_divide(model, parallel.tp, "columns of the shared experts", moe.d_ff_shared)


def _must_divide(model: ModelShape, tp: int, what: str, n: int) -> None:
    if n % tp:
        raise RooflineError(f"tp {tp} does not divide the {n} {what} of {model.name}")
