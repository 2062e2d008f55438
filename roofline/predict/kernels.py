"""How long a kernel takes, as a function of what it does and a few fitted parameters.

One formula a family, used alike by the fit (arrays of measured rows) and by predictions (one op). `t0` is a
launch floor, `eta` a share of a ceiling. Everything returns seconds.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from burstline.roofline.device.calibration import DecodeFit, GemmFit, LinkFit, PassFit, PrefillFit
from burstline.roofline.device.device import Device

Amounts = npt.NDArray[np.float64]

# Tiles of the output that libraries of the sm80-sm89 generation compile (CUTLASS's default configurations).
_TILES = np.array(
    [(a, b) for a in (16, 32, 64, 128, 256) for b in (32, 64, 128, 256) if a * b <= 128 * 256], dtype=float
)
_TILE = 128.0  # rows of a usual tile, of queries, and of keys in attention
_SMALL_TILE = 64.0  # row tile up to 128 rows
_BLOCKS_PER_UNIT = 2  # attention blocks that one unit holds at once
_UNIT_BYTES_PER_S = (
    60e9  # a GPU has at most so much bandwidth for each unit; a TPU's one unit is many of those
)


@dataclass(frozen=True, slots=True)
class Rates:
    """The ceilings that a kernel's parameters are shares of."""

    flops_per_s: float
    bytes_per_s: float
    n_units: int
    cache_bytes: float

    @staticmethod
    def of(device: Device, dtype: str | None = None) -> "Rates":
        """`dtype` None: of a kernel that does not compute in matrix units."""
        peak = device.peak_flops_per_s(dtype) if dtype else 0.0
        return Rates(peak, device.bytes_per_s, device.n_units or 1, device.cache_bytes)


@dataclass(frozen=True, slots=True)
class Products:
    """`groups` products of [m, k] x [k, n]; bytes are of all groups together.

    `quantised_bytes` move in a kernel of its own, before the product, where one measurement holds both.
    """

    m: Amounts
    n: Amounts
    k: Amounts
    groups: Amounts
    weight_bytes: Amounts
    in_bytes: Amounts
    out_bytes: Amounts
    quantised_bytes: Amounts


def product_s(fit: GemmFit, rates: Rates, x: Products) -> Amounts:
    """Seconds of the products alone, launches and the quantising of their inputs apart.

    Compute and memory each at their own share of the ceiling. `k_fill` stands for what every tile pays to
    fill and drain its pipeline, in columns of k. `chain_s` is what a tile takes for a column of k when it
    has a unit to itself: with few columns of outputs most units idle, and no kernel of 8 or 4 bits splits k.
    """
    columns = _tiled(fit, rates, x) if fit.operand_rows else x.groups * x.n * _padded_rows(fit, x.m)
    compute = 2 * columns * (x.k + fit.k_fill) / (fit.eta_c * rates.flops_per_s)
    side = fit.reread * _TILE * np.sqrt(rates.n_units)
    moved = x.weight_bytes + x.in_bytes
    if side:
        moved = x.weight_bytes * np.maximum(1, x.m / side) + x.in_bytes * np.maximum(1, x.n / side)
    memory = (moved + x.out_bytes) / (fit.eta_m * rates.bytes_per_s)
    both = p_norm(compute, memory, fit.p)
    return p_norm(both, fit.chain_s * x.k, 2.0) if fit.chain_s else both


def quantise_s(fit: GemmFit, rates: Rates, moved_bytes: Amounts) -> Amounts:
    """A kernel that quantises inputs: a launch, their bytes through memory and, one after the other, through
    the units, whose own rate limits it on fast memory."""
    units = max(rates.n_units, rates.bytes_per_s / _UNIT_BYTES_PER_S)
    a_byte = 1 / (fit.eta_m * rates.bytes_per_s) + fit.quantise_byte_s / units
    return fit.quantise_s + moved_bytes * a_byte


def gemm_s(fit: GemmFit, rates: Rates, x: Products) -> Amounts:
    quantising = np.where(x.quantised_bytes > 0, quantise_s(fit, rates, x.quantised_bytes), 0.0)
    return fit.t0_s + quantising + product_s(fit, rates, x)


def p_norm(a: Amounts, b: Amounts, p: float) -> Amounts:
    """A smooth max: what two pipes that overlap, but not perfectly, take together."""
    most = np.maximum(np.maximum(a, b), 1e-300)
    return np.asarray(most * ((a / most) ** p + (b / most) ** p) ** (1 / p))


def _padded_rows(fit: GemmFit, m: Amounts) -> Amounts:
    tile = np.where(m > _TILE, float(fit.row_tile), _SMALL_TILE)
    return np.asarray(m + fit.pad * (np.ceil(m / tile) * tile - m))


def _tiled(fit: GemmFit, rates: Rates, x: Products) -> Amounts:
    """The output's elements, as many as it takes the best of the tiles to cover them in waves."""
    rows, columns = _TILES.T
    m, n, groups = x.m[:, None], x.n[:, None], x.groups[:, None]
    share = groups * np.ceil(m / rows) * np.ceil(n / columns) / rates.n_units
    waves = share + fit.pad * (np.maximum(np.ceil(share), 1) - share)
    cost = rows * columns + fit.operand_rows * (rows + columns)
    usual = 1 + 2 * fit.operand_rows / _TILE  # a square tile of the usual size costs its area
    return np.asarray((waves * rates.n_units * cost).min(axis=1) / usual)


@dataclass(frozen=True, slots=True)
class Decodes:
    """Attention of `n_requests` with one new token each; `kv_bytes` of all of them."""

    n_requests: Amounts
    context_tok: Amounts
    n_kv_heads: Amounts
    kv_bytes: Amounts
    activation_bytes: Amounts


def decode_s(fit: DecodeFit, rates: Rates, x: Decodes) -> Amounts:
    reads = (np.maximum(x.context_tok, _TILE) + fit.extra_tok) / x.context_tok
    share = x.n_requests * x.n_kv_heads / (rates.n_units * _BLOCKS_PER_UNIT)
    # Fewer pairs than places: the keys are split, and every unit works.
    idle = np.where(share < 0.8, 0, np.ceil(share) / np.maximum(share, 0.8) - 1)
    moved = (x.kv_bytes * reads + x.activation_bytes) * (1 + fit.wave * idle)
    memory = moved / (fit.eta_m * rates.bytes_per_s)
    units = moved * fit.unit_byte_s / rates.n_units
    return np.asarray(fit.t0_s + p_norm(memory, units, 16.0))  # whichever is slower, all but exactly


@dataclass(frozen=True, slots=True)
class Prefills:
    """Attention over prompts: causal FLOPs, how many keys a query sees on average, the longest prompt."""

    flops: Amounts
    keys_per_query: Amounts
    longest_tok: Amounts
    head_dim: Amounts
    activation_bytes: Amounts


def prefill_s(fit: PrefillFit, rates: Rates, x: Prefills) -> Amounts:
    # A tile of queries sees half a tile of keys more than the mask leaves it.
    whole = x.flops * (1 + (_TILE / 2 + fit.extra_tok) / np.maximum(x.keys_per_query, 1))
    last = 4 * x.head_dim * _TILE * (x.longest_tok + fit.extra_tok) * rates.n_units
    compute = (whole + fit.tail * last) / (fit.eta_c * rates.flops_per_s)
    memory = x.activation_bytes / (fit.eta_m * rates.bytes_per_s)
    return fit.t0_s + p_norm(compute, memory, 4.0)


def pass_s(fit: PassFit, rates: Rates, moved_bytes: Amounts) -> Amounts:
    near = np.minimum(moved_bytes, rates.cache_bytes)
    return fit.t0_s + (near / fit.eta_cache + (moved_bytes - near) / fit.eta_m) / rates.bytes_per_s


def all_reduce_s(fit: LinkFit, link_bytes_per_s: float, message_bytes: Amounts) -> Amounts:
    """A ring: each rank sends 2(n - 1)/n of the message over its own links."""
    ring = 2 * (fit.n_ranks - 1) / fit.n_ranks * message_bytes
    return fit.t0_s + ring / (fit.eta * link_bytes_per_s)
