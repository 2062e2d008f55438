"""A device's peaks: dense FLOP rates, memory levels, links. Every number has a source.

The bundled table is `devices.toml`; a user's own device is a TOML file with one such table at its top level.

`collective_s` is the lower bound of a collective on a hierarchy of links: within a package, a node, between
nodes. A group of ranks fills the nearest tier first. An all-reduce runs as a reduce-scatter tier by tier
outwards, each tier on the share that the one before left, and an all-gather back in, so that slow outer links
carry the least (arXiv 2501.04266 partitions by the same tiers). Where switches reduce (NVLS), an all-reduce
may send each rank's buffer up and its sum down once.
"""

import math
import platform
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, Literal

from burstline.errors import RooflineError, read_toml, tables_beside
from burstline.roofline.model.shapes import ELEMENT_BYTES
from burstline.wording import hint

Limit = Literal["compute", "memory", "latency", "communication"]
"""The resource of a device that bounds an op."""


@dataclass(frozen=True, slots=True)
class Level:
    """One level of memory. `bytes_per_s` is None where it is not known (most GPUs' L2)."""

    name: str
    capacity_bytes: float
    bytes_per_s: float | None


@dataclass(frozen=True, slots=True)
class Link:
    """One tier of the links between devices.

    `scope` is "package", "node" or "network"; up to `n_devices` reach each other over it. `bytes_per_s` is
    one direction, per device. `latency_s` is one hop's; 0 where unknown, so that a ceiling stays a ceiling.
    `in_switch`: switches reduce what passes through them (NVLS). `mesh`: a link to each other device, so that
    fewer devices use a part of the rate.
    """

    scope: str
    kind: str
    n_devices: int
    bytes_per_s: float
    latency_s: float = 0.0
    in_switch: bool = False
    mesh: bool = False


@dataclass(frozen=True, slots=True)
class Device:
    """A device's ceilings. `levels` and `links` run from the nearest to the farthest; peaks are dense.

    `host_link_bytes_per_s` is one direction to the host: PCIe 4 x16 where the table states none.
    """

    id: str
    name: str
    peaks: Mapping[str, float]
    levels: tuple[Level, ...]
    links: tuple[Link, ...] = ()
    vendor: str = ""
    arch: str = ""
    n_units: int | None = None
    tdp_w: float | None = None
    usd_per_hour: float | None = None
    host_link_bytes_per_s: float = 32e9
    aliases: tuple[str, ...] = ()
    source: str = ""
    assurance: str = ""
    note: str = ""

    @property
    def memory(self) -> Level:
        """The main memory: the farthest level, where weights and KV cache live."""
        return self.levels[-1]

    @property
    def bytes_per_s(self) -> float:
        assert self.memory.bytes_per_s is not None
        return self.memory.bytes_per_s

    @property
    def cache_bytes(self) -> float:
        """The last-level cache's capacity; 0 where the device states none."""
        return self.levels[-2].capacity_bytes if len(self.levels) > 1 else 0.0

    def peak_flops_per_s(self, dtype: str) -> float:
        """The dense peak of matrix products in `dtype`; raises rather than fall back to another dtype."""
        if dtype not in self.peaks:
            raise RooflineError(
                f"{self.name} has no dense {dtype} peak; it has {', '.join(sorted(self.peaks))}."
                " Choose one of these, or describe the device in a file of your own"
            )
        return self.peaks[dtype]

    def ridge(self, dtype: str) -> float:
        """The intensity, FLOP per byte of main memory, from which a product in `dtype` is compute-bound."""
        return self.peak_flops_per_s(dtype) / self.bytes_per_s

    def with_network(self, bytes_per_s: float, latency_s: float = 0.0) -> "Device":
        """This device with a network of `bytes_per_s` per device and direction between its nodes."""
        network = Link("network", "network", 2**20, bytes_per_s, latency_s)
        return replace(self, links=(*(link for link in self.links if link.scope != "network"), network))

    def times(self, peak: float, bandwidth: float, capacity: float = 1.0) -> "Device":
        """This device with so many times the peaks, and the bandwidth and capacity of each level."""
        levels = tuple(
            replace(
                level,
                capacity_bytes=capacity * level.capacity_bytes,
                bytes_per_s=level.bytes_per_s and bandwidth * level.bytes_per_s,
            )
            for level in self.levels
        )
        return replace(self, peaks={dtype: peak * of for dtype, of in self.peaks.items()}, levels=levels)


def load_device(name_or_path: str) -> Device:
    """The bundled device of that id, alias or NVML name, or the one a TOML file describes."""
    if name_or_path.endswith(".toml"):
        path = Path(name_or_path)
        if not path.is_file():
            raise RooflineError(f"no device file at {name_or_path}")
        table = read_toml(path)
        return read_device(table.get("id", path.stem), table)
    by_name, key = _bundled_by_name(), _plain(name_or_path)
    if key in by_name:
        return by_name[key]
    ids = sorted(device.id for device in bundled_devices())
    raise RooflineError(
        f"unknown device {name_or_path!r}, and no .toml file that describes one; "
        f"{hint(name_or_path.lower(), ids)}"
    )


BUNDLED: Final = Path(__file__).with_name("devices.toml")


@cache
def bundled_devices() -> tuple[Device, ...]:
    tables = tables_beside(__file__, "devices.toml")
    return tuple(read_device(id_, table) for id_, table in tables.items())


def read_device(id_: str, table: Mapping[str, Any]) -> Device:
    """The device of one table of `devices.toml` or of a user's file; raises on what is missing or unknown."""
    for key in ("peak_flops_per_s", "levels"):
        if not table.get(key):
            raise RooflineError(f"device {id_}: {key} is missing; see {BUNDLED} for the shape of a device")
    peaks = table["peak_flops_per_s"]
    for dtype in peaks:
        if dtype not in ELEMENT_BYTES:
            known = ", ".join(ELEMENT_BYTES)
            raise RooflineError(f"device {id_}: unknown dtype {dtype!r} in peak_flops_per_s; known: {known}")
    try:
        levels = tuple(
            Level(lv["name"], lv["capacity_bytes"], lv.get("bytes_per_s")) for lv in table["levels"]
        )
        links = tuple(Link(**link) for link in table.get("links", ()))
    except (KeyError, TypeError) as error:
        raise RooflineError(f"device {id_}: a level or link is not as in {BUNDLED}: {error}") from error
    usd_per_hour = table.get("usd_per_hour")
    if usd_per_hour is not None and not (isinstance(usd_per_hour, int | float) and usd_per_hour > 0):
        raise RooflineError(f"device {id_}: usd_per_hour is {usd_per_hour!r}; expected US dollars above 0")
    if levels[-1].bytes_per_s is None:
        raise RooflineError(f"device {id_}: its last level, {levels[-1].name}, needs bytes_per_s")
    stated = {slot.name: table[slot.name] for slot in fields(Device) if slot.name in table}
    read: dict[str, Any] = {"id": id_, "peaks": peaks, "levels": levels, "links": links}
    return Device(**{"name": id_, **stated, **read, "aliases": tuple(table.get("aliases", ()))})


@cache
def _bundled_by_name() -> dict[str, Device]:
    return {_plain(name): device for device in bundled_devices() for name in (device.id, *device.aliases)}


def _plain(name: str) -> str:
    """A name as it is compared: lower case, without the vendor, spaces as hyphens."""
    words = name.lower().replace("(", " ").replace(")", " ").replace("_", " ").replace("-", " ").split()
    return "-".join(
        word for word in words if word not in ("nvidia", "amd", "intel", "google", "geforce", "instinct")
    )


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
            # A double binary tree: up and down again, every rank sends the buffer twice.
            tree_s = 2 * math.ceil(math.log2(ranks)) * link.latency_s + 2 * share / link.bytes_per_s
            by = {"ring": 2 * _ring_s(link, share, ranks), "tree": tree_s}
            if link.in_switch:
                by["in_switch"] = 2 * link.latency_s + share / link.bytes_per_s
            times.append((by[algorithm] if algorithm else min(by.values()), link.kind))
        share /= ranks
    return times


def _ring_s(link: Link, buffer_bytes: float, ranks: int) -> float:
    """A reduce-scatter or an all-gather: ranks - 1 hops, each of one rank's share of the buffer."""
    return (ranks - 1) * (link.latency_s + buffer_bytes / ranks / link.bytes_per_s)


def _all_to_all(sent_bytes: float, n_ranks: int, tiers: list[tuple[Link, int]]) -> list[tuple[float, str]]:
    """Per tier, the part of what one rank sends whose receivers are that far and no nearer."""
    sizes = [1, *(size for _, size in tiers)]
    return [
        (link.latency_s + sent_bytes * (outer - inner) / n_ranks / link.bytes_per_s, link.kind)
        for (link, _), (inner, outer) in zip(tiers, pairwise(sizes), strict=True)
    ]


def cpu_model() -> str | None:
    """This machine's."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or None
