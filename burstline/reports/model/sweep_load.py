"""How hard a run drove its server, and which runs differ in that alone."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from burstline.measure.record.manifest import Manifest

KINDS: Final = {"concurrency": ("Concurrency", "concurrency {}"), "rate": ("Requests per second", "{} req/s")}
"""What a load is counted in: the heading of its column, and how one or several are written."""
OF_THE_LOAD: Final = ("requests", "duration_s", "rate", "concurrency", "workers", "salt")
"""What of a workload may differ between the loads of one sweep: how hard it drives, for how long."""
STEADY: Final = ("constant", "poisson", "gamma")


@dataclass(frozen=True, slots=True, order=True)
class SweepLoad:
    """How hard a server is driven: `kind` is a key of KINDS."""

    kind: str
    value: float

    def __str__(self) -> str:
        return KINDS[self.kind][1].format(self.number)

    @property
    def number(self) -> str:
        return f"{self.value:g}"


def load_range(first: SweepLoad, last: SweepLoad) -> str:
    """`concurrency 1 to 16`, `2 to 8 req/s`."""
    return KINDS[last.kind][1].format(f"{first.number} to {last.number}")


def load_of(manifest: Manifest) -> SweepLoad | None:
    """The run's load; None of a burst, a ramp and other runs without one."""
    asked = manifest.asked
    if asked.concurrency:
        return SweepLoad("concurrency", float(asked.concurrency))
    return SweepLoad("rate", asked.rate) if asked.pattern in STEADY and asked.rate else None


def work_asked(manifest: Manifest) -> tuple[str, ...] | None:
    """What was asked of the server, its load apart; None of a run without a load."""
    load = load_of(manifest)
    if load is None:
        return None
    return (
        load.kind,
        *(f"{key} {value}" for key, value in manifest.asked.to_json().items() if key not in OF_THE_LOAD),
    )


def differ_in_load_alone(manifests: Sequence[Manifest]) -> bool:
    """Whether runs are one workload at two loads or more."""
    works = {work_asked(manifest) for manifest in manifests}
    loads = {load_of(manifest) for manifest in manifests}
    return len(works) == 1 and None not in works and len(loads) > 1
