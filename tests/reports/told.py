"""A run as what is said of it is judged: its summary and manifest in the words of a reader."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from burstline.measure.record.columns import Columns
from burstline.measure.record.manifest import Manifest
from burstline.measure.record.rundir import Run
from burstline.measure.record.summary import Summary
from burstline.measure.stats.figure import Estimate


def _no_values() -> dict[str, str]:
    return {}


@dataclass(frozen=True)
class Told:
    """A run of which something is said, with the values in the sentence."""

    summary: Summary
    manifest: Manifest
    records: Run | None = None
    said: Mapping[str, str] = field(default_factory=_no_values)

    @property
    def columns(self) -> Columns | None:
        """Its records, read when a predicate needs them."""
        return self.records.columns if self.records else None

    def n(self, *outcomes: str) -> int:
        return sum(self.summary.counts.get(each, 0) for each in outcomes)

    @property
    def n_failed(self) -> int:
        """All that did not succeed, but for those that hung up as planned."""
        return self.n("planned") - self.n("ok", "abandoned")

    @property
    def n_cut_off(self) -> int:
        return self.n("cancelled", "not_sent", "predecessor")

    def value(self, section: str, name: str, *more: str) -> float | None:
        figure = self.summary.figure(section, name, *more)
        return figure.point if isinstance(figure, Estimate) else None

    def most(self, section: str, name: str) -> float:
        """0 where it is not known."""
        return self.value(section, name) or 0.0

    def has(self, *codes: str) -> bool:
        return any(each.code in codes for each in self.summary.verdict.reasons)

    @property
    def slots(self) -> int | None:
        return self.manifest.identity.max_num_seqs if self.manifest.identity else None

    @property
    def in_flight(self) -> float:
        return self.most("concurrency", "max")

    @property
    def users(self) -> int | None:
        return self.manifest.asked.concurrency

    @property
    def is_open(self) -> bool:
        return self.manifest.asked.kind == "open loop"

    @property
    def is_watched(self) -> bool:
        """Whether the server's queue was recorded."""
        return self.value("concurrency", "server_waiting_mean") is not None

    @property
    def waits(self) -> bool:
        """Whether requests waited for a place in the server, as far as it says."""
        return self.most("concurrency", "server_waiting_mean") > 0

    @property
    def has_queue(self) -> bool:
        """Whether the server itself counted at least one request that waited, on average or at its most."""
        names = ("server_waiting_mean", "server_waiting_max")
        return any(self.most("concurrency", name) >= 1 for name in names)

    @property
    def had_room(self) -> bool:
        """Whether the server took nearly all requests at once: few waited, and none was put back."""
        waiting, mean = self.most("concurrency", "server_waiting_mean"), self.most("concurrency", "mean")
        running = self.most("concurrency", "server_running_max")
        few = waiting <= max(1.0, 0.25 * (mean or self.in_flight)) or running >= 0.9 * self.in_flight
        short = self.slots is not None and self.slots < self.in_flight and running >= self.slots
        many = short and waiting >= 0.25 * (self.in_flight - (self.slots or 0)) > 0
        return few and not many and not self.most("memory", "preemptions")

    @property
    def kept_up(self) -> bool:
        """Whether an open load's requests came out as fast as they went in, and were served."""
        served, rate = self.value("throughput", "requests_per_s"), self.manifest.asked.rate
        stayed = 1 - self.n("abandoned") / max(self.n("planned"), 1)
        behind = served is not None and rate is not None and served < 0.75 * rate * stayed
        lost = self.n_failed - self.n_cut_off
        return not self.has("overloaded") and not behind and lost <= 0.1 * self.n("planned")

    @property
    def as_asked(self) -> bool:
        """Whether the load that was sent was the one that was asked for."""
        late, rate = self.has("send-lag"), self.manifest.asked.rate
        lag_s = self.value("instrument", "send_lag_p99_s")
        punctual = late and rate is not None and lag_s is not None and lag_s <= 0.1 / rate
        is_bound = late or self.summary.verdict.state == "CLIENT-BOUND"
        return not self.has("slow-client") and (punctual or not is_bound)

    def unreliable(self, *, sent: bool | None = None, unknown: bool | None = None) -> bool:
        """Whether a percentile is graded unreliable: by late sends or late reads, by an unknown amount."""
        for row in self.summary.grades.values():
            for each in row.values():
                by_sends = (each.send_effect_s or 0.0) > (each.read_effect_s or 0.0)
                if each.grade == "unreliable" and not each.held:
                    is_unknown = each.read_effect_s is None
                    if sent in (None, by_sends and not is_unknown) and unknown in (None, is_unknown):
                        return True
        return False

    def missed(self, *ops: str) -> bool:
        return any(
            each.result == "fail" and any(op in each.target for op in ops) for each in self.summary.targets
        )
