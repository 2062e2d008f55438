"""What the server used and what it says of itself: memory, the cost and energy of its output, its latencies.

Its own latency histograms are compared with the client's latencies. A server's clock starts when it has taken
a request in, the client's when the last byte was written; both stop with a token. What the client has more is
the network, whatever stands between, and the server's own front end (its HTTP server, its tokenizer); the
server can never have more.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, replace

import numpy as np

from burstline.loadgen.capture.drive_report import DriveReport
from burstline.measure.metrics.definitions import e2e_service, gaps, ttft_service
from burstline.measure.record.columns import Columns
from burstline.measure.record.summary import Agreement, Cost, Memory, Throughput
from burstline.measure.record.telemetry import Telemetry
from burstline.measure.record.verdict import FLOOR_S, Reason
from burstline.measure.stats.estimates import Absent, Estimate, Figure, measured
from burstline.measure.stats.quantiles import Samples
from burstline.servers.identity import Identity
from burstline.wording import time_text

LATENCIES = ("ttft", "itl", "e2e")
UNEXPLAINED = 0.05
"""The share of a latency by which the two sides may differ before a warning."""


def agreement(c: Columns, watched: Telemetry) -> Agreement:
    """By latency the client's median and the server's, and how much more the client has.

    TTFT and E2E count from when the request was written, ITL is pooled over tokens. `*_gap_s` is the
    difference of the means, Absent where the two counted different numbers: then they saw different things.
    """
    figures: dict[str, Figure] = {}
    for name in LATENCIES:
        samples, (median, mean_s) = _client(name, c), _of_server(watched, name)
        total, p50_s = int(samples.ranked.total), samples.ranked.quantile(0.5) if len(samples.value) else None
        client = measured(p50_s, "s", "the client has no such latency", total)
        figures |= {f"{name}_client_p50_s": client, f"{name}_server_p50_s": median}
        figures[f"{name}_gap_s"] = _gap(client, median, float((samples.value * samples.weight).sum()), mean_s)
    return Agreement(**figures, **_means(watched))


def _means(watched: Telemetry) -> dict[str, Figure]:
    """The server's own split of a request's time and of a step's: only what the engine exports.

    These have no counterpart at the client.
    """
    figures: dict[str, Figure] = {}
    for name in (slot.name for slot in fields(Agreement) if slot.name.startswith("server_")):
        counter = name.removeprefix("server_").removesuffix("_mean_s")
        grown = watched.grown_together("engine", f"{counter}_")
        if not isinstance(grown, Absent) and set(grown) == {"sum", "count"} and grown["count"]:
            unit = "s" if name.endswith("_s") else "1"
            figures[name] = measured(grown["sum"] / grown["count"], unit, "", int(grown["count"]))
    return figures


def disagreement(agreed: Agreement, read_late_s: Mapping[str, float]) -> Iterator[Reason]:
    """What the two sides cannot both mean, or what lies between them but our own late reads, the first."""
    for name in LATENCIES:
        gap, client = agreed.figure(f"{name}_gap_s"), agreed.figure(f"{name}_client_p50_s")
        if isinstance(gap, Absent) or isinstance(client, Absent):
            continue
        least = max(FLOOR_S, UNEXPLAINED * client.point)
        if -least <= gap.point <= max(least, 2 * read_late_s.get(name, 0.0)):
            continue
        which = "server-view.shorter" if gap.point > 0 else "server-view.longer"
        yield Reason.of(which, metric=name.upper(), size=time_text(abs(gap.point)))
        return


def _client(name: str, c: Columns) -> Samples:
    """The values as the server would count them."""
    if name == "itl":
        came = gaps(c, counted=True)
        return Samples(came.value / came.weight, came.weight, came.counts)
    return Samples.per_request(ttft_service(c) if name == "ttft" else e2e_service(c)[c.ok])


def _gap(client: Figure, server: Figure, client_s: float, server_mean_s: float) -> Figure:
    """`client_s` is the sum of the client's values."""
    if isinstance(server, Absent) or isinstance(client, Absent):
        return server if isinstance(server, Absent) else client
    if server.n < client.n:
        return Absent(f"the server's own metrics are incomplete ({server.n:,} of {client.n:,})")
    if server.n > client.n:
        counted = f"{server.n:,}, here {client.n:,}"
        return Absent(f"the server also counted others' or failed requests ({counted})")
    gap_s = client_s / client.n - server_mean_s
    return Estimate(gap_s, None, None, None, client.n, "s", "difference of the means")


def _of_server(watched: Telemetry, name: str) -> tuple[Figure, float]:
    """The median of the growth of the server's own histogram, and the mean, s.

    The median is interpolated in the bucket that holds it, between whose edges it lies for certain.
    """
    grown = watched.grown_together("engine", f"{name}_")
    if isinstance(grown, Absent):
        return grown, math.nan
    buckets = {float(key.removeprefix("le_")): n for key, n in grown.items() if key.startswith("le_")}
    if not buckets or not grown.get("count"):
        return Absent("the server's histogram did not grow"), math.nan
    at_most_s = sorted(buckets)  # to infinity
    n = np.array([buckets[edge] for edge in at_most_s])
    total, k = int(n[-1]), int(np.searchsorted(n, int(n[-1]) / 2))
    low, before = (at_most_s[k - 1], float(n[k - 1])) if k else (0.0, 0.0)
    high = at_most_s[k]
    if math.isinf(high):
        median = Estimate(low, low, None, 1.0, total, "s", "beyond the last bucket")
    else:
        point = low + (high - low) * (total / 2 - before) / float(n[k] - before)
        median = Estimate(point, low, high, 1.0, total, "s", "the server's own histogram")
    return median, grown["sum"] / total


def memory(watched: Telemetry, reports: Sequence[DriveReport], identity: Identity | None) -> Memory:
    """Peaks while the load ran, and what the server says it has.

    `server_peak_bytes` is the largest sum of RSS over the server's processes (a page that n share counts n
    times; `server_anon_peak_bytes` leaves shared pages out, `server_pss_bytes` divides them, once, after the
    load). `device_peak_bytes` is what all GPUs held, reservations included; `kv_peak_fraction` is the share
    of the KV cache really in use. What a server still holds after the load counts beyond what it held before
    it; Absent where its gauges were not read both before and after.
    """
    unknown = "the server does not report it"
    who, stated = identity or Identity(""), watched.peak("engine", "resident_bytes", "bytes")
    return Memory(
        server_peak_bytes=watched.peak("server", "rss_bytes", "bytes"),
        server_anon_peak_bytes=watched.peak("server", "anon_bytes", "bytes"),
        server_pss_bytes=watched.peak("server", "pss_bytes", "bytes"),
        server_said_bytes=None if isinstance(stated, Absent) else stated,
        client_peak_bytes=measured(sum(each.peak_rss_bytes for each in reports), "bytes", "", len(reports))
        if reports
        else watched.peak("client", "rss_bytes", "bytes"),
        device_peak_bytes=_device_peak(watched),
        weights_bytes=measured(who.weight_bytes, "bytes", unknown),
        kv_capacity_bytes=measured(who.kv_bytes, "bytes", unknown),
        kv_capacity_tok=measured(who.kv_tok, "tok", unknown),
        kv_peak_fraction=watched.most("kv_used_fraction", "1"),
        preemptions=watched.grown("engine", "preemptions", "preemptions"),
        running_after=_left(watched, "running", "requests"),
        kv_after_fraction=_left(watched, "kv_used_fraction", "1"),
    )


def cost(
    rates: Throughput,
    watched: Telemetry,
    usd_per_hour: float | None,
    *,
    window: tuple[float, float] | None = None,
    server_here: bool = True,
) -> Cost:
    """Cost and energy of the tokens; Absent with the reason where nothing tells.

    Power is the mean over the `window` in which `rates` count (seconds from the run's start; None: the load),
    summed over GPUs; idle GPUs that were watched count. Idle power is that before the load.
    """
    start_s, end_s = window or (0.0, watched.length_s)

    def power(kind: str, start_s: float, end_s: float) -> Figure:
        if not server_here:
            return Absent("the server is on another machine", "elsewhere")
        sources = watched.devices() if kind == "gpu" else [kind]
        powers = [watched.power_w(source, start_s, end_s) for source in sources]
        total = None if None in powers or not powers else sum(filter(None, powers))
        names = [(source, name) for source in sources for name in ("energy_j", "power_w")]
        known = any(len(watched.series(*name)[1]) for name in names)
        why = watched.absent(kind, "energy_j").reason
        if known:
            lost = [watched.absent(each, "*").reason for each in sources if watched.names(each, "*")]
            why = "; ".join(lost) or "it was not read for long enough"
        return measured(total, "W", why, len(powers))

    gpu, cpu = (power(kind, start_s, end_s) for kind in ("gpu", "cpu"))
    idle, cpu_idle = (power(kind, -math.inf, 0.0) for kind in ("gpu", "cpu"))
    above = gpu
    if isinstance(gpu, Estimate):
        above = idle if isinstance(idle, Absent) else replace(gpu, point=max(0.0, gpu.point - idle.point))
    usd = None if usd_per_hour is None else measured(usd_per_hour / 3600 * 1e6, "USD", "")
    return Cost(
        usd_per_million_output_tok=usd and _per(usd, rates.output_tok_per_s, "USD"),
        usd_per_million_input_tok=usd and _per(usd, rates.input_tok_per_s, "USD"),
        device_power_w=gpu,
        device_idle_power_w=idle,
        joules_per_output_tok=_per(gpu, rates.output_tok_per_s, "J"),
        joules_above_idle_per_output_tok=_per(above, rates.output_tok_per_s, "J"),
        cpu_power_w=cpu,
        cpu_idle_power_w=cpu_idle,
        cpu_joules_per_output_tok=_per(cpu, rates.output_tok_per_s, "J"),
    )


def _per(amount: Figure, rate: Figure, unit: str) -> Figure:
    if isinstance(amount, Absent) or isinstance(rate, Absent):
        return amount if isinstance(amount, Absent) else rate
    if rate.point <= 0:
        return Absent("no such token was served", "not-positive")
    return measured(amount.point / rate.point, unit, "", amount.n)


def _left(watched: Telemetry, gauge: str, unit: str) -> Figure | None:
    """How much more a gauge shows after the load than before; None where the engine does not have it."""
    grown = watched.change("engine", gauge, unit)
    if isinstance(grown, Absent):
        return grown if len(watched.series("engine", gauge)[1]) else None
    return measured(max(0.0, grown.point), unit, "", grown.n)


def _device_peak(watched: Telemetry) -> Figure:
    peaks = [watched.peak(device, "memory_used_bytes", "bytes") for device in watched.devices()]
    points = [peak.point for peak in peaks if not isinstance(peak, Absent)]
    absent = watched.absent("gpu", "memory_used_bytes").reason
    return measured(sum(points) if points else None, "bytes", absent, len(points))
