"""`burstline certify`: fire a load's shape at a server of known truth, and say how far off we are."""

import argparse
from collections.abc import Iterator
from dataclasses import replace

from burstline import certification, exit_codes
from burstline.bench.load_options import checked
from burstline.flags import add_options, read_options
from burstline.loadgen.record.typed_json import to_json
from burstline.loadgen.verdict.certificate import (
    TOLERATED,
    Certificate,
    EventRateLimit,
    MetricError,
    ServedSchedule,
)
from burstline.stdout import json_text
from burstline.workloads.spec import LoadSpec

LONG_S = 10.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "burstline certify [the flags of the load, as for run] [--json]"
    add_options(parser.add_argument_group("the load"), LoadSpec)
    parser.add_argument("--json", action="store_true", help="print the certificate as JSON")


def run(args: argparse.Namespace) -> int:

    load = checked(read_options(LoadSpec, args))
    planned = certification.drill(load, LONG_S)
    found = replace(certification.certified(planned), limit=certification.climbed())
    if args.json:
        print(json_text(to_json(found)))
    else:
        print(told(load.title, planned.notes, found))
    return exit_codes.DONE if found.is_clean else exit_codes.INCONCLUSIVE


def told(title: str, notes: tuple[str, ...], found: Certificate) -> str:
    """The certificate for a person."""
    return "\n".join(_lines(title, notes, found))


def _lines(title: str, notes: tuple[str, ...], found: Certificate) -> Iterator[str]:
    cut = f" ({'; '.join(notes)})" if notes else ""
    yield f"{title}{cut}, fired at a server of known truth"
    yield f"{found.n_events:,} events, {found.events_per_s or 0:,.0f} a second"
    if found.n_unmatched:
        yield f"{found.n_unmatched:,} of {found.n_requests:,} requests failed, and stand in no figure below"
    yield ""
    yield "ms           true p50   reported   true p99   reported       bias  p99 |error|"
    yield from (_metric(name, error) for name, error in found.errors.items())
    yield ""
    yield from _schedule(found.schedule)
    p50_s, p99_s = found.read_lag_p50_s, found.read_lag_p99_s
    if p50_s is not None and p99_s is not None:
        yield (
            f"Read lag        p50 {p50_s * 1e6:.0f} us, p99 {p99_s * 1e6:,.0f} us; "
            f"taken out by the kernel's stamps of {found.kernel_stamped:.0%} of the events"
        )
    else:
        yield "Read lag        not known: the kernel stamped nothing"
    if found.cpu_per_event_s is not None:
        yield (
            f"Client CPU      {found.cpu_per_event_s * 1e6:.1f} us an event, requests and captures included"
        )
    if found.server_late_p99_s is not None:
        yield (
            f"Truth server    sent up to {found.server_late_p99_s * 1e3:.2f} ms late at p99; "
            "errors count from when it did send"
        )
    if found.others_cpu_fraction is not None:
        yield f"Others          took {found.others_cpu_fraction:.0%} of the machine's CPU meanwhile"
    if found.limit is not None:
        yield f"ITL p99         {_limit(found.limit)}"


def _metric(name: str, error: MetricError) -> str:
    columns = (
        error.true_p50_s,
        error.reported_p50_s,
        error.true_p99_s,
        error.reported_p99_s,
    )
    values = "".join(f"{value * 1e3:11.3f}" for value in columns)
    return f"{name.upper():10}{values}{error.bias_s * 1e3:+11.3f}{error.p99_s * 1e3:13.3f}"


def _schedule(schedule: ServedSchedule) -> Iterator[str]:
    if schedule.late_p50_s is None or schedule.late_p99_s is None:
        yield "Schedule        a closed loop has none"
        return
    if schedule.spread_s is not None:
        yield f"Burst           {schedule.spread_s * 1e3:.1f} ms from the first arrival to the last"
    yield (
        f"Schedule        requests were at the server {schedule.late_p50_s * 1e3:.2f} ms after due at p50, "
        f"{schedule.late_p99_s * 1e3:.2f} ms at p99"
    )
    if schedule.rate_error is not None:
        ks = "" if schedule.gap_ks is None else f", Kolmogorov-Smirnov distance {schedule.gap_ks:.3f}"
        yield (
            f"                rate {schedule.rate_error:+.3%} off, gaps vary by {schedule.gap_cv or 0:.3f} "
            f"(planned {schedule.planned_gap_cv or 0:.3f}){ks}"
        )


def _limit(found: EventRateLimit) -> str:
    within = f"within {TOLERATED:.0%} up to "
    if found.by == "client":
        return f"{within}{found.events_per_s:,.0f} events a second; above, the client does not follow"
    whose = "the truth server sends no faster" if found.by == "truth server" else "no more was tried"
    return f"{within}at least {found.events_per_s:,.0f} events a second: {whose}"
