"""Lower bounds of collectives on a hierarchy of links: within a package, a node, between nodes.

A group of ranks fills the nearest tier first. An all-reduce runs as a reduce-scatter tier by tier outwards,
each tier on the share that the one before left, and an all-gather back in, so that slow outer links carry the
least (arXiv 2501.04266 partitions by the same tiers). Where switches reduce (NVLS), an all-reduce may send
each rank's buffer up and its sum down once.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Literal

from burstline.errors import RooflineError
from burstline.roofline.device.device import Link

Algorithm = Literal["ring", "tree", "in_switch", "flat"]


def collective_s(
    kind: str, message_bytes: float, n_ranks: int, links: Sequence[Link], algorithm: Algorithm | None = None
) -> tuple[float, str]:
    """Seconds of one collective, and the kind of the link that takes most of them.

    `algorithm` None takes the fastest that each tier has: ring, tree, or reduction in its switch; "flat" is
    one ring over all ranks, as fast as the farthest link. Raises where the links do not reach.
    """
    if n_ranks == 1:
        return 0.0, ""
    tiers = _tiers(n_ranks, links)
    if algorithm == "flat":
        tiers, algorithm = tiers[-1:], "ring"
    if kind == "send":
        times = [(link.latency_s + message_bytes / link.bytes_per_s, link.kind) for link, _ in tiers[-1:]]
    elif kind == "all_to_all":
        times = _all_to_all(message_bytes, n_ranks, tiers)
        return max(times)  # a rank's links work at the same time
    elif kind in ("all_reduce", "all_gather"):
        times = _staged(kind, message_bytes, tiers, algorithm)
    else:
        raise ValueError(f"no collective {kind!r}")
    return math.fsum(time for time, _ in times), max(times)[1]


def _tiers(n_ranks: int, links: Sequence[Link]) -> list[tuple[Link, int]]:
    """Each link tier a group of `n_ranks` needs, with how many devices of the group it joins."""
    if not links or links[-1].n_devices < n_ranks:
        reach = links[-1].n_devices if links else 1
        raise RooflineError(
            f"{n_ranks} ranks need links between as many devices, but this device's links reach {reach};"
            " use fewer ranks, or state the network between nodes (--network-gb-per-s)"
        )
    tiers = []
    for link in links:
        n = min(n_ranks, link.n_devices)
        if link.mesh:
            link = replace(link, bytes_per_s=link.bytes_per_s * (n - 1) / (link.n_devices - 1))
        tiers.append((link, n))
        if link.n_devices >= n_ranks:
            break
    return tiers


def _staged(
    kind: str, message_bytes: float, tiers: list[tuple[Link, int]], algorithm: Algorithm | None
) -> list[tuple[float, str]]:
    sizes = [1, *(size for _, size in tiers)]
    share, times = message_bytes, []
    for (link, _), (inner, outer) in zip(tiers, pairwise(sizes), strict=True):
        ranks = math.ceil(outer / inner)
        if kind == "all_gather":
            times.append((_ring_s(link, share, ranks), link.kind))
        else:
            by = {"ring": 2 * _ring_s(link, share, ranks), "tree": _tree_s(link, share, ranks)}
            if link.in_switch:
                by["in_switch"] = 2 * link.latency_s + share / link.bytes_per_s
            times.append((by[algorithm] if algorithm else min(by.values()), link.kind))
        share /= ranks
    return times


def _ring_s(link: Link, buffer_bytes: float, ranks: int) -> float:
    """A reduce-scatter or an all-gather: ranks - 1 hops, each of one rank's share of the buffer."""
    return (ranks - 1) * (link.latency_s + buffer_bytes / ranks / link.bytes_per_s)


def _tree_s(link: Link, buffer_bytes: float, ranks: int) -> float:
    """An all-reduce over a double binary tree: up and down again, every rank sends the buffer twice."""
    return 2 * math.ceil(math.log2(ranks)) * link.latency_s + 2 * buffer_bytes / link.bytes_per_s


def _all_to_all(sent_bytes: float, n_ranks: int, tiers: list[tuple[Link, int]]) -> list[tuple[float, str]]:
    """Per tier, the part of what one rank sends whose receivers are that far and no nearer."""
    sizes = [1, *(size for _, size in tiers)]
    return [
        (link.latency_s + sent_bytes * (outer - inner) / n_ranks / link.bytes_per_s, link.kind)
        for (link, _), (inner, outer) in zip(tiers, pairwise(sizes), strict=True)
    ]
