"""The contents of summary.json: named sections of numbers, written and read through these types.

A figure is one line here: its name, and the title that reports print. `measure/summarize.py` computes them.
To add a figure, add its line and compute it; to add a section, add a class and a field of `Summary`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Final, Self, dataclass_transform

from burstline.measure.record import typed_json
from burstline.measure.record.manifest import SCHEMA
from burstline.measure.record.typed_json import OPTIONAL
from burstline.measure.record.verdict import MOST_SHARE, PercentileGrade, Replies, SloResult, Verdict
from burstline.measure.stats.figure import Absent, Estimate, Figure, known
from burstline.roofline.predict.forecast import NoForecast, Score
from burstline.roofline.reconcile.reconciliation import NotReconciled, Profiled, Reconciliation

LACKING: Final = Absent("the summary was made before this figure existed", "not-in-this-summary")
"""A figure that the summary's file does not hold; `burstline report RUN` computes it."""


@dataclass(frozen=True, slots=True)
class NamedFigure:
    """A figure with its name and title. A share is a fraction of a whole, shown in percent."""

    name: str
    title: str
    figure: Figure
    is_share: bool = False


def titled(title: str, *, share: bool = False) -> Any:
    """A figure's line."""
    return field(default=LACKING, metadata={"title": title, "share": share})


def optional(title: str) -> Any:
    """The same, of a figure that a run may not have at all."""
    return field(default=None, metadata={"title": title, **OPTIONAL})


@dataclass_transform(frozen_default=True)
@dataclass(frozen=True)
class Section:
    """Figures that belong together. Each subclass becomes a frozen dataclass by itself."""

    def __init_subclass__(cls) -> None:
        dataclass(frozen=True)(cls)

    @classmethod
    def absent(cls, why: Absent) -> Self:
        """The section where none of its figures exists, all for the same reason."""
        return cls(**{slot.name: why for slot in fields(cls) if not slot.metadata.get("optional")})

    def rows(self, prefix: str = "") -> Iterator[NamedFigure]:
        """Every figure, those of nested sections with their names in front."""
        for slot in fields(self):
            name, value = slot.name, getattr(self, slot.name)
            if isinstance(value, Section):
                yield from value.rows(f"{prefix}{name}.")
            elif isinstance(value, Estimate | Absent):
                share = name.endswith("_fraction") or slot.metadata.get("share", False)
                yield NamedFigure(f"{prefix}{name}", slot.metadata["title"], value, share)

    def figure(self, name: str) -> Figure:
        """The figure of that name; LACKING where there is none."""
        value = getattr(self, name, LACKING)
        return value if isinstance(value, Estimate | Absent) else LACKING


class Quantiles(Section):
    p50: Figure = titled("p50")
    p90: Figure = titled("p90")
    p95: Figure = titled("p95")
    p99: Figure = titled("p99")


class MetricFigures(Quantiles):
    """One metric over all planned requests, or over all tokens.

    `instrument_error` is the most by which late reading can have moved one of its percentiles, and at least
    what the canary was off; None where the client cannot move the metric.
    """

    mean: Figure = titled("mean")
    std: Figure = titled("SD")
    min: Figure = titled("min")
    max: Figure = titled("max")
    instrument_error: Figure | None = optional("± instrument")


class Throughput(Section):
    output_tok_per_s: Figure = titled("Output throughput")
    input_tok_per_s: Figure = titled("Input throughput")
    total_tok_per_s: Figure = titled("Total throughput")
    requests_per_s: Figure = titled("Request throughput")
    read_error_fraction: Figure | None = optional("± instrument, of each of these")


class Goodput(Section):
    """Requests that met every per-request SLO in `criteria`."""

    criteria: tuple[str, ...] = ()
    attainment: Figure = titled("Requests that met every SLO", share=True)
    requests_per_s: Figure = titled("Request throughput")
    tok_per_s: Figure = titled("Output of these requests")


class CountedWindow(Section):
    """The part of the run that counts, seconds from its start."""

    start_s: Figure = titled("Start")
    end_s: Figure = titled("End")
    warm_up_s: Figure = titled("Warm-up left out")
    n_warm_up: Figure = titled("Requests in the warm-up")

    @property
    def length_s(self) -> Figure:
        if isinstance(self.start_s, Absent) or isinstance(self.end_s, Absent):
            return self.end_s
        return replace(self.end_s, point=self.end_s.point - self.start_s.point)


class TurnFigures(Section):
    """All turns at one place in their sessions, from 1; `requests` were planned, `ok` of them succeeded."""

    turn: int
    requests: int
    ok: int
    ttft: Quantiles = Quantiles()
    e2e: Quantiles = Quantiles()
    prompt_tok_mean: Figure = titled("Prompt tokens, mean")
    earlier_fraction: Figure = titled("Share of prompt tokens from earlier turns")
    cached_fraction: Figure = titled("Share of prompt tokens from the prefix cache")


class SessionFigures(Section):
    """Whole conversations; a session with a failed turn never ends."""

    sessions: Figure = titled("Sessions")
    completed: Figure = titled("Share of sessions with every turn served", share=True)
    makespan_p50_s: Figure = titled("Session makespan, p50")
    makespan_p90_s: Figure = titled("Session makespan, p90")
    makespan_p95_s: Figure = titled("Session makespan, p95")
    makespan_p99_s: Figure = titled("Session makespan, p99")
    makespan_mean_s: Figure = titled("Session makespan, mean")
    early_turns: Figure = titled("Turns sent before their pause was over")
    pause_late_p99_s: Figure = titled("Turns sent after their pause, late by p99")
    earlier_fraction: Figure = titled("Share of prompt tokens from earlier turns")
    by_turn: tuple[TurnFigures, ...] = ()


class CacheSize(Section):
    """What a prefix cache of so many blocks would serve if requests came one after another."""

    blocks: int
    hit_tok: Figure = titled("Hits in a cache of this size")


class PrefixCache(Section):
    """Prompt tokens from the prefix cache: as the plan explains them, and as they were counted.

    `simulated_tok` is of an LRU cache with the engine's own blocks, `unexplained_tok` what was served beyond
    it (below 0: less). `by_size` is the miss-ratio curve.
    """

    prompt_tok: Figure = titled("Prompt tokens")
    infinite_tok: Figure = titled("Hits expected from an infinite cache")
    simulated_tok: Figure = titled("Hits expected from the engine's cache")
    counted_tok: Figure = titled("Hits by the engine's metrics")
    replied_tok: Figure = titled("Hits by the replies")
    unexplained_tok: Figure = titled("Unexplained hits")
    restarted_s: Figure = titled("Engine's counters began again")
    by_size: tuple[CacheSize, ...] = ()

    @property
    def served_tok(self) -> Figure:
        """Hits by the replies, else by the engine's metrics."""
        return self.counted_tok if isinstance(self.replied_tok, Absent) else self.replied_tok


class Stationarity(Section):
    """Mann-Kendall trend tests, and the Theil-Sen change over the run as a share of the median."""

    in_flight_trend_p: Figure = titled("In flight: p-value of the trend")
    in_flight_change_fraction: Figure = titled("In flight: change over the run, relative to the median")
    ttft_trend_p: Figure = titled("TTFT: p-value of the trend")
    ttft_change_fraction: Figure = titled("TTFT: change over the run, relative to the median")
    tpot_trend_p: Figure = titled("TPOT: p-value of the trend")
    tpot_change_fraction: Figure = titled("TPOT: change over the run, relative to the median")


class ScheduleFigures(Section):
    """Requests as sent, compared with the plan."""

    planned_per_s: Figure = titled("Rate planned")
    achieved_per_s: Figure = titled("Rate achieved")
    rate_error: Figure = titled("Rate achieved against planned (0 is exact)")
    planned_gap_cv: Figure = titled("CV of the planned gaps between requests")
    gap_cv: Figure = titled("CV of the achieved gaps between requests")


class Concurrency(Section):
    mean: Figure = titled("Mean")
    max: Figure = titled("Most at once")
    server_running_max: Figure = titled("Running in the server, maximum")
    server_waiting_max: Figure = titled("Waiting in the server, maximum")
    server_waiting_mean: Figure = titled("Waiting in the server, mean")
    server_full_fraction: Figure | None = optional("Of the time with a queue, as many ran as ever")
    open_after_fraction: Figure = titled("Open after the last token", share=True)
    streaming_max: Figure | None = optional("Most replies that streamed at once while others waited")


class Burst(Section):
    first_wave_s: Figure = titled("Time to the first token")
    drain_s: Figure = titled("Time to drain")
    plateau_tok_per_s: Figure = titled("Plateau (10% to 90% of first tokens)")
    ttft_slope_s_per_request: Figure = titled("TTFT slope along the queue")
    prefill_requests_per_s: Figure = titled("Requests admitted")
    prefill_tok_per_s: Figure = titled("Prompt tokens admitted")


class Stalls(Section):
    count: Figure = titled("Stalls")
    total_s: Figure = titled("Total time stalled, all requests")
    request_fraction: Figure = titled("Requests with a stall")
    threshold_s: Figure = titled("Shortest gap that counts as a stall")


class LengthFigures(Section):
    """Planned and served tokens of a request."""

    planned_mean: Figure = titled("Planned, mean")
    planned_min: Figure = titled("Planned, minimum")
    planned_max: Figure = titled("Planned, maximum")
    served_mean: Figure = titled("Served, mean")
    served_min: Figure = titled("Served, minimum")
    served_max: Figure = titled("Served, maximum")


class LengthSummary(Section):
    """Planned and served lengths of what succeeded; tallies count requests."""

    prompt_tok: LengthFigures = LengthFigures()
    output_tok: LengthFigures = LengthFigures()
    prompt_mismatches: Figure = titled("Requests with a different prompt length")
    output_mismatches: Figure = titled("Requests with a different output length")
    output_tok_of_failed: Figure = titled("Output tokens of failed requests")
    cached_tok: Figure = titled("Prompt tokens from the prefix cache")
    cached_fraction: Figure = titled("Share of prompt tokens from the prefix cache")
    finish_reasons: Mapping[str, int] = field(default_factory=dict)
    prompt_sources: Mapping[str, int] = field(default_factory=dict)
    output_sources: Mapping[str, int] = field(default_factory=dict)
    splits: Mapping[str, int] = field(default_factory=dict)
    count_gaps: Figure = titled("Requests whose two counts differ")
    beyond_tok: Figure = titled("Output tokens beyond the requested length")
    hidden_tok: Figure = titled("Output tokens whose text was not shown")
    cut_behind: Figure = titled("Replies without a proper end")


class Instrument(Section):
    """How late and how costly the client was, and what the canary says of it."""

    send_spread_s: Figure = titled("First to last request sent")
    send_lag_p50_s: Figure = titled("Requests sent late, p50")
    send_lag_p99_s: Figure = titled("Requests sent late, p99")
    send_lag_max_s: Figure = titled("Requests sent late, max")
    read_lag_p50_s: Figure = titled("Read delay after arrival, at most, p50")
    read_lag_p99_s: Figure = titled("Read delay after arrival, at most, p99")
    read_lag_max_s: Figure = titled("Read delay after arrival, max")
    read_error_p50_s: Figure = titled("Error bound of arrival times, p50")
    read_error_p99_s: Figure = titled("Error bound of arrival times, p99")
    read_error_max_s: Figure = titled("Error bound of arrival times, max")
    kernel_stamps: Figure = titled("Share of arrivals stamped by the kernel", share=True)
    unread_fraction: Figure | None = optional("Time in flight after a reply's last token, until it was read")
    max_pass_s: Figure = titled("Longest pass of the read loop")
    peak_events_per_s: Figure = titled("Most events in a second")
    client_cpu_s: Figure = titled("CPU time of the client")
    client_peak_bytes: Figure = titled("Load drivers, peak resident")
    involuntary_switches: Figure = titled("Involuntary context switches of the client")
    resent: Figure = titled("Requests sent twice")
    clock_drift_s: Figure = titled("Drift of the wall clock")
    clock_error_s: Figure | None = optional("Clocks of the load's machines, error at most")
    server_cpu_s: Figure = titled("CPU time of the server")
    others_cpu_fraction: Figure = titled("CPU used by others")
    steal_fraction: Figure = titled("CPU stolen by the hypervisor")
    cpu_waiting_fraction: Figure = titled("Time in which some task waited for a CPU")
    throttled_fraction: Figure = titled("Time the client was throttled")
    client_cpu_wait_fraction: Figure = titled("Time the client waited for a CPU")
    gpu_slowed_fraction: Figure | None = optional("Time that heat or a power fault slowed a GPU")
    gpu_power_capped_fraction: Figure | None = optional("Time that its power limit slowed a GPU")
    canary_p50_s: Figure = titled("In-run canary: reported minus true, p50")
    canary_p99_s: Figure = titled("In-run canary: reported minus true, p99")
    canary_beyond_p99_s: Figure = titled("… outside the client's own bounds, p99")
    canary_cpu_fraction: Figure = titled("CPU that the canary used, of the machine")
    network_rtt_s: Figure | None = optional("Network's share of each TTFT, one round trip by TCP")
    network_rtt_p99_s: Figure | None = optional("Round trip by TCP when a connection closed, p99")
    network_retransmits: Figure | None = optional("TCP segments sent again")


class Memory(Section):
    """Peaks while the load ran, and what the server says it has."""

    server_peak_bytes: Figure = titled("Server processes, peak resident")
    server_anon_peak_bytes: Figure = titled("… without shared pages")
    server_pss_bytes: Figure = titled("… shared pages split (PSS)")
    server_said_bytes: Figure | None = optional("Server's resident memory, by its own metrics")
    client_peak_bytes: Figure = titled("Load drivers, peak resident")
    device_peak_bytes: Figure = titled("Device memory, peak")
    weights_bytes: Figure = titled("Weights")
    kv_capacity_bytes: Figure = titled("KV cache, capacity")
    kv_capacity_tok: Figure = titled("KV cache, capacity in tokens")
    kv_peak_fraction: Figure = titled("KV cache, peak use")
    preemptions: Figure = titled("Preemptions")
    running_after: Figure | None = optional("Requests in flight after the load")
    kv_after_fraction: Figure | None = optional("KV cache, use after the load")


class Cost(Section):
    """Money and energy for tokens. Each price is that of all the time, for input or for output alone.

    Energy is that of the GPUs that were watched, and of this machine's CPUs, in the time that rates count.
    Idle is the server with its model loaded, before the load.
    """

    usd_per_million_output_tok: Figure | None = optional("Cost per million output tokens")
    usd_per_million_input_tok: Figure | None = optional("Cost per million input tokens")
    device_power_w: Figure = titled("GPU power, mean")
    device_idle_power_w: Figure = titled("… idle, before the load")
    joules_per_output_tok: Figure = titled("GPU energy per output token")
    joules_above_idle_per_output_tok: Figure = titled("… above idle")
    cpu_power_w: Figure = titled("CPU power, mean")
    cpu_idle_power_w: Figure = titled("… idle, before the load")
    cpu_joules_per_output_tok: Figure = titled("CPU energy per output token")


class Conservation(Section):
    """Tokens as the client received them against the growth of the server's own counters."""

    output_client_tok: Figure = titled("Output, counted from the replies")
    output_server_tok: Figure = titled("Output, by the server's counters")
    output_residual: Figure = titled("Output, difference as a share")
    prompt_client_tok: Figure = titled("Prompts, counted from the replies")
    prompt_server_tok: Figure = titled("Prompts, by the server's counters")
    prompt_residual: Figure = titled("Prompts, difference as a share")


class Agreement(Section):
    """The server's own latency histograms, compared with the client's latencies."""

    ttft_client_p50_s: Figure = titled("TTFT p50, from the request written")
    ttft_server_p50_s: Figure = titled("… by the server's own histogram")
    ttft_gap_s: Figure = titled("… mean at the client minus mean at the server")
    itl_client_p50_s: Figure = titled("ITL p50")
    itl_server_p50_s: Figure = titled("… by the server's own histogram")
    itl_gap_s: Figure = titled("… mean at the client minus mean at the server")
    e2e_client_p50_s: Figure = titled("E2E p50, from the request written")
    e2e_server_p50_s: Figure = titled("… by the server's own histogram")
    e2e_gap_s: Figure = titled("… mean at the client minus mean at the server")
    server_queue_mean_s: Figure | None = optional("Queue, mean by the server")
    server_prefill_mean_s: Figure | None = optional("Prefill, mean by the server")
    server_decode_mean_s: Figure | None = optional("Decoding, mean by the server")
    server_inference_mean_s: Figure | None = optional("Inference, mean by the server")
    server_validation_mean_s: Figure | None = optional("Validation, mean by the server")
    server_token_mean_s: Figure | None = optional("Time per token, mean by the server")
    server_prefill_step_mean_s: Figure | None = optional("Prefill step, mean by the server")
    server_prefill_forward_mean_s: Figure | None = optional("… its forward pass")
    server_decode_step_mean_s: Figure | None = optional("Decode step, mean by the server")
    server_decode_forward_mean_s: Figure | None = optional("… its forward pass")
    server_accepted: Figure | None = optional("Drafted tokens accepted per draft")
    server_acceptance: Figure | None = optional("Share of drafted tokens accepted")
    server_accepted_a_step: Figure | None = optional("Tokens per decode step")


@dataclass(frozen=True, slots=True)
class SecondReader:
    """How many replies another client read, which of them `differ`, and which it could not read, and why."""

    client: str
    n: int
    differ: tuple[str, ...] = ()
    unread: tuple[str, ...] = ()


class Audit(Section):
    """Replies of the load, compared with the same requests sent alone afterwards; each was sent alone twice.

    Positions and lengths count tokens where the server sends ids, else characters.
    """

    answer: Replies | None = field(default=None, metadata=OPTIONAL)
    under_load: Figure = titled("Replies that differ from the first alone", share=True)
    alone: Figure = titled("… the second alone from the first", share=True)
    excess: Figure = titled("Differ under load, more than alone", share=True)
    first_difference_p50: Figure | None = optional("First difference under load, median position")
    cut_short: Figure = titled("Replies cut short under load", share=True)
    loops: Figure = titled("Replies that end in a loop, under load", share=True)
    loops_alone: Figure = titled("… alone", share=True)
    second_reader: SecondReader | None = field(default=None, metadata=OPTIONAL)


@dataclass(frozen=True, slots=True)
class Summary:
    """Every number of a run. `counts` are requests by outcome, `planned` the sum of all others.

    `grades` say by metric and percentile how far the client moved it.
    """

    counts: Mapping[str, int]
    metrics: Mapping[str, MetricFigures]
    verdict: Verdict
    targets: tuple[SloResult, ...] = ()
    bounds: Mapping[str, Quantiles] = field(default_factory=dict)
    interactivity: Quantiles = Quantiles()
    throughput: Throughput = Throughput()
    goodput: Goodput = Goodput()
    window: CountedWindow = CountedWindow()
    stationarity: Stationarity = Stationarity()
    schedule: ScheduleFigures = ScheduleFigures()
    concurrency: Concurrency = Concurrency()
    burst: Burst = Burst()
    stalls: Stalls = Stalls()
    lengths: LengthSummary = LengthSummary()
    instrument: Instrument = Instrument()
    memory: Memory = Memory()
    cost: Cost = Cost()
    conservation: Conservation = Conservation()
    agreement: Agreement = Agreement()
    grades: Mapping[str, Mapping[str, PercentileGrade]] = field(default_factory=dict)
    sessions: SessionFigures | None = field(default=None, metadata=OPTIONAL)
    prefix_cache: PrefixCache | None = field(default=None, metadata=OPTIONAL)
    roofline: Reconciliation | NotReconciled | None = field(default=None, metadata=OPTIONAL)
    forecast: Score | NoForecast | None = field(default=None, metadata=OPTIONAL)
    profile: Profiled | NotReconciled | None = field(default=None, metadata=OPTIONAL)
    audit: Audit | None = field(default=None, metadata=OPTIONAL)
    schema: int = SCHEMA

    @property
    def has_late_rates(self) -> bool:
        """Whether late reads may have changed the rates by more than 5%."""
        return (known(self.throughput.read_error_fraction) or 0.0) > MOST_SHARE

    def figure(self, section: str, *names: str) -> Figure:
        """The figure at a path such as ("metrics", "ttft", "p99"); LACKING where there is none."""
        node: Any = getattr(self, section, None)
        if isinstance(node, Mapping) and names:
            node, names = node.get(names[0]), names[1:]
        return node.figure(names[0]) if isinstance(node, Section) and names else LACKING

    def spoilt_by(self, *path: str) -> str:
        """What makes the number at the path unreliable, in words; "" where nothing does."""
        is_late = path[-1].endswith("_per_s") and self.has_late_rates
        return self.verdict.spoils(self.grades.get(path[1], {}).get(path[-1]), is_late=is_late)

    def rows(self) -> Iterator[NamedFigure]:
        """Every figure, named by its path: `metrics.ttft.p50`."""
        for slot in fields(self):
            value = getattr(self, slot.name)
            parts = value if isinstance(value, Mapping) else {"": value}
            for key, part in parts.items():
                if isinstance(part, Section):
                    yield from part.rows(f"{slot.name}.{key}." if key else f"{slot.name}.")

    def to_json(self) -> dict[str, Any]:
        row: dict[str, Any] = typed_json.plain(self)
        return {"schema": row.pop("schema"), **row}

    @classmethod
    def from_json(cls, row: Mapping[str, Any]) -> Summary:
        """The summary; MismatchError, naming the place, where it is none of this schema."""
        if (schema := row.get("schema")) != SCHEMA:
            raise typed_json.MismatchError(f"schema is {schema!r}, this version reads only {SCHEMA}")
        return typed_json.from_fields(cls, row)
