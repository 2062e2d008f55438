"""Service-level objectives (`--slo`) and whether a run met them: pass, fail, or inconclusive.

An SLO on a percentile, a mean or the whole run (`ttft.p99<=2s`, `output_tok_per_s>=1000`) is a target. One
on single requests (`ttft<=2s`) is a criterion: goodput counts the requests that meet them all.
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from burstline.measure.metrics.definitions import METRICS, PERCENTILES, QUANTILES
from burstline.measure.metrics.throughput import RATES
from burstline.measure.record.columns import Columns, Floats
from burstline.measure.record.summary import Summary
from burstline.measure.record.verdict import QUEUE_GREW, Grade, SloResult, State, Use, withheld
from burstline.measure.stats.estimates import clopper_pearson, early_stopping_floor, order_statistic_ranks
from burstline.measure.stats.figure import Absent, Estimate, Figure, Result, known, measured, noted
from burstline.measure.stats.limit_search import Evidence, LatencyBound
from burstline.wording import time_text
from burstline.workloads.arrivals import STEADY_PATTERNS
from burstline.workloads.load import Load
from burstline.workloads.request import WorkloadError

STATISTICS: Final = (*PERCENTILES, "mean")

WHOLE_RUN: Final[Mapping[str, tuple[str, str, str, str]]] = {
    **{name: ("throughput", name, METRICS[name].unit, ">=") for name in RATES},
    "goodput_per_s": ("goodput", "requests_per_s", "1/s", ">="),
    "attainment": ("goodput", "attainment", "1", ">="),
    "drain_s": ("burst", "drain_s", "s", "<="),
    "server_peak_bytes": ("memory", "server_peak_bytes", "bytes", "<="),
    "device_peak_bytes": ("memory", "device_peak_bytes", "bytes", "<="),
}
"""SLOs on a run as a whole: where the summary has the number, its unit, and which way it may go."""

UNITS: Final[Mapping[str, Mapping[str, float]]] = {
    "s": {"s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6},
    "1": {"": 1.0, "%": 0.01},
    "tok/s": {"": 1.0, "tok/s": 1.0},
    "1/s": {"": 1.0, "/s": 1.0, "req/s": 1.0},
    "bytes": {"B": 1.0, "MB": 1e6, "GB": 1e9, "MiB": 2.0**20, "GiB": 2.0**30},
}
"""By stored unit, the units that a person may write and what each is worth."""

ATTAINMENT: Final = "attainment"
SHARES: Final = (ATTAINMENT, "goodput_per_s")
"""SLOs on the requests that meet all criteria."""
MAY_BE_WHY: Final = {
    State.DISTURBED: "other work on this machine may be why it is missed",
    State.COLD: "its slow first requests may be why it is missed",
}
WORST_FIRST: Final = (Result.FAIL, Result.INCONCLUSIVE, Result.PASS)
CERTAIN_MARGIN: Final = 2.0
"""By what factor a single run must meet or miss a target: nothing is known of the noise between runs."""

_SLO = re.compile(
    r"\s*(?P<metric>[a-z_0-9]+?)(\.(?P<statistic>p[0-9.]+|mean))?\s*(?P<op><=|>=)\s*"
    r"(?P<value>[0-9]+\.?[0-9]*([eE][+-]?[0-9]+)?)\s*(?P<unit>[^\s0-9]*)\s*"
)


@dataclass(frozen=True, slots=True)
class Slo:
    """`statistic` is one of STATISTICS, None for a whole run or single requests; `bound` in stored units.
    `advice` is for what one run leaves open."""

    text: str
    metric: str
    statistic: str | None
    op: str
    bound: float
    advice: str = " (use --repeats 3)"

    @property
    def per_request(self) -> bool:
        """Whether it is a criterion for single requests rather than a target."""
        return self.statistic is None and self.metric in METRICS and self.metric not in WHOLE_RUN

    @property
    def p(self) -> float:
        """The share of a percentile, 0.9 of p90; only of one."""
        return float(str(self.statistic)[1:]) / 100


def parse_slo(text: str) -> Slo:
    """The SLO in `metric[.statistic]<=value unit`; WorkloadError, naming what is known, where it is none."""
    found = _SLO.fullmatch(text)
    if found is None:
        raise WorkloadError(
            f"--slo {text!r}: expected METRIC<=VALUE UNIT or METRIC.PERCENTILE<=VALUE UNIT (>= where more is "
            "better), e.g. --slo 'ttft.p99<=2s' (in quotes: a shell takes < and > for itself)"
        )
    metric, statistic, op = found["metric"], found["statistic"], found["op"]
    unit, wanted_op = _unit_and_direction(text, metric, statistic)
    if op != wanted_op:
        better = "lower" if wanted_op == "<=" else "higher"
        raise WorkloadError(f"--slo {text!r}: {metric} is better {better}, expected {wanted_op}")
    factor = UNITS[unit].get(found["unit"])
    if factor is None:
        known = ", ".join(name or "none" for name in UNITS[unit])
        raise WorkloadError(f"--slo {text!r}: unit {found['unit']!r} of {metric}; expected one of {known}")
    bound = float(found["value"]) * factor
    if not 0 < bound < math.inf:
        raise WorkloadError(f"--slo {text!r}: expected a value above 0, and a finite one")
    return Slo(re.sub(r"\s+", "", text), metric, statistic, op, bound)


def cannot_be_met(targets: Sequence[str], load: Load) -> list[str]:
    """What is known before the load of targets on percentiles: those that so few requests cannot settle."""
    n = math.inf if load.until_s is not None or load.has_sessions else load.arrivals.n
    first = load.spec.concurrency or int(load.arrivals.pattern in STEADY_PATTERNS)
    floors = {
        slo: early_stopping_floor(slo.p)
        for slo in map(parse_slo, targets)
        if slo.statistic in PERCENTILES and METRICS[slo.metric].of is not None
    }
    behind = f" behind the first{f' {first:,}' * (first > 1)}" * bool(first)
    told = "{} may not be met in one run: {} needs at least {:,} requests{}, {:,} are planned".format
    rows = [(slo, floor) for slo, floor in floors.items() if n - first < floor]
    return [told(slo.text, slo.statistic, floor, behind, n) for slo, floor in rows]


def _unit_and_direction(text: str, metric: str, statistic: str | None) -> tuple[str, str]:
    latencies = [name for name, row in METRICS.items() if row.of or row.pooled]
    if metric in WHOLE_RUN:
        if statistic is not None:
            raise WorkloadError(f"--slo {text!r}: {metric} is one number a run, it has no {statistic}")
        return WHOLE_RUN[metric][2:]
    if metric not in latencies:
        raise WorkloadError(
            f"--slo {text!r}: no metric {metric!r}; with a percentile: {', '.join(latencies)}; "
            f"without: {', '.join(WHOLE_RUN)}"
        )
    if statistic is None and METRICS[metric].of is None:
        raise WorkloadError(
            f"--slo {text!r}: {metric} has no value per request; give a percentile, e.g. {metric}.p99"
        )
    if statistic is not None and statistic not in STATISTICS:
        raise WorkloadError(f"--slo {text!r}: no {statistic}; expected one of {', '.join(STATISTICS)}")
    return METRICS[metric].unit, "<="


def missed(c: Columns, slos: Sequence[Slo]) -> Floats | None:
    """Per request, its value as a share of the bound, of the criterion among `slos` that it misses most.

    A request is good at 1 and below; a failure is infinitely far from it. None where that is unknown: a
    metric that is undefined by nature (TPOT of a single token) is no criterion for that request, but one that
    was not measured for a success, for example because its tokens were not counted, decides nothing.
    """
    shares = np.where(c.ok, 0.0, np.inf)
    for slo in slos:
        of = METRICS[slo.metric].of if slo.per_request else None
        if of is not None:
            values, undefined = of(c), METRICS[slo.metric].undefined(c)
            if (np.isnan(values) & c.ok & ~undefined).any():
                return None
            shares = np.where(undefined, shares, np.fmax(shares, values / slo.bound))
    return shares


def attainment(met: NDArray[np.bool_], note: str | None = None) -> Figure:
    """The share of planned requests that are good, without an interval."""
    share = measured(float(met.mean()) if len(met) else None, "1", "nothing was planned", len(met))
    return noted(share, note) if note else share


NO_CRITERION: Final = Absent("no per-request SLO was given (such as --slo 'ttft<=2s')", "no-criterion")


def state_decides(summary: Summary) -> bool:
    """Whether the state of the run makes it no success, for exit codes and JUnit alike.

    SLOs follow the grade of their own metric and decide alone, unless the run FAILED.
    """
    state = summary.verdict.state
    return state == State.FAILED if summary.targets else state != State.VALID


def judge_slos(slos: Sequence[Slo], summary: Summary, c: Columns) -> tuple[SloResult, ...]:
    """Every target among `slos` with what was measured."""
    misses, targets = missed(c, slos) if len(c) else None, [slo for slo in slos if not slo.per_request]
    return tuple(_judge(slo, summary.figure(*_path(slo)), c, [summary], misses) for slo in targets)


def judge_over_runs(
    slos: Sequence[Slo], runs: Sequence[Summary], pooled: Callable[[tuple[str, ...]], Figure]
) -> tuple[SloResult, ...]:
    """Every target among `slos` over several runs of one load; `pooled` is their common figure at a path.

    What makes one run's result doubtful makes this one so. Where a run lacks the figure, its own result
    counts.
    """
    results = []
    for slo in (slo for slo in slos if not slo.per_request):
        own = [row for run in runs for row in run.targets if row.target == slo.text]
        worst = min(own, key=lambda row: list(WORST_FIRST).index(row.result))
        figure = pooled(_path(slo))
        results.append(worst if isinstance(figure, Absent) else _judge(slo, figure, None, runs, None))
    return tuple(results)


def _missed_below(slo: Slo, summary: Summary, c: Columns) -> str:
    """Which lower percentile misses the target already: the asked one, not known well enough, is no lower."""
    if slo.statistic not in PERCENTILES:
        return ""
    for p in PERCENTILES[: PERCENTILES.index(slo.statistic)]:
        figure = summary.figure("metrics", slo.metric, p)
        if _held_against(replace(slo, statistic=p), figure, c)[0] == Result.FAIL:
            how = f"is already {time_text(value)}" if (value := known(figure)) else "misses it already"
            return f"too few requests to tell {slo.statistic}, but {p} {how}"
    return ""


def _path(slo: Slo) -> tuple[str, ...]:
    if slo.metric in WHOLE_RUN:
        return WHOLE_RUN[slo.metric][:2]
    return "metrics", slo.metric, str(slo.statistic)


def _judge(
    slo: Slo, figure: Figure, c: Columns | None, runs: Sequence[Summary], misses: Floats | None
) -> SloResult:
    """The target by its `figure`; `c` are the requests where that is of one run."""
    result, reason = _held_against(slo, figure, c, misses, sum(run.counts.get("planned", 0) for run in runs))
    if c is not None and result == Result.INCONCLUSIVE:
        lower = _missed_below(slo, runs[0], c)
        result, reason = (Result.FAIL, lower) if lower else (result, reason)
    waits = slo.metric.startswith(("ttft", "e2e")) and any(run.verdict.has(QUEUE_GREW) for run in runs)
    if waits and result == Result.INCONCLUSIVE and isinstance(figure, Estimate):
        is_beyond = figure.point > slo.bound
        result = Result.FAIL if is_beyond else result
        reason = f"the queue kept growing: a longer run {'misses it by more' if is_beyond else 'may miss it'}"
    doubts = () if result == Result.INCONCLUSIVE else (_doubt(slo, result, figure, run) for run in runs)
    doubt = next(filter(None, doubts), None)
    return SloResult(slo.text, Result.INCONCLUSIVE if doubt else result, doubt or reason, figure)


def _doubt(slo: Slo, result: Result, figure: Figure, summary: Summary) -> str | None:
    """Why the result does not count: the grade of the percentile it is on, then the state of the run."""
    grade = summary.grades.get(slo.metric, {}).get(str(slo.statistic))
    if by := spoilt_by(slo, summary):
        return f"{by}: it spoils {slo.metric}{f'.{slo.statistic}' * bool(slo.statistic)}"
    shown = figure.point if isinstance(figure, Estimate) else math.inf
    if grade is not None and grade.read_effect_s and abs(shown - slo.bound) <= grade.read_effect_s:
        return "late reads could change the result"
    as_sent_s = grade.as_sent_s if grade is not None and grade.grade == Grade.AS_SENT else None
    if as_sent_s is not None and (as_sent_s <= slo.bound) != (shown <= slo.bound):
        return f"late sends change the result: counted from the send it is {as_sent_s:.4g} s"
    state = withheld(summary.verdict, Use.MET if result == Result.PASS else Use.MISSED)
    if state is None:
        return None
    why = MAY_BE_WHY.get(state)
    return f"the run is {state}{f': {why}' if why else f', so this does not count (measured: {result})'}"


def spoilt_by(slo: Slo, summary: Summary) -> str:
    """What spoilt the SLO's number, or may have changed which requests are good, in words; "" for nothing."""
    places = [_path(slo)]
    if slo.metric in SHARES:
        most = max(0.5, slo.bound if slo.metric == ATTAINMENT else 0.0)
        ps = [p for p, share in zip(PERCENTILES, QUANTILES, strict=True) if share <= most]
        criteria = [(each, p) for each in map(parse_slo, summary.goodput.criteria) for p in ps]
        places += [("metrics", each.metric, p) for each, p in criteria if _may_cross(each, p, summary)]
    return next(filter(None, (summary.spoilt_by(*place) for place in places)), "")


def _may_cross(criterion: Slo, p: str, summary: Summary) -> bool:
    """Whether what makes a percentile unreliable may have moved it across the bound of single requests."""
    graded = summary.grades.get(criterion.metric, {}).get(p)
    value = known(summary.figure("metrics", criterion.metric, p))
    if value is None or graded is None or graded.held or graded.read_effect_s is None:
        return True
    return abs(value - criterion.bound) <= max(graded.read_effect_s, graded.send_effect_s or 0.0)


def _held_against(
    slo: Slo, figure: Figure, c: Columns | None, misses: Floats | None = None, planned: int = 0
) -> tuple[Result, str]:
    if isinstance(figure, Absent):
        if c is not None and _lies_among_failures(slo, c):
            n_failed = len(c) - int(c.ok.sum())
            return Result.FAIL, f"{n_failed:,} of {len(c):,} requests failed: infinitely late"
        return Result.INCONCLUSIVE, figure.reason
    if figure.level is None:
        return _by_margin(slo, figure, misses)
    near, far = (figure.high, figure.low) if slo.op == "<=" else (figure.low, figure.high)
    sign = 1 if slo.op == "<=" else -1
    if near is not None and sign * near <= sign * slo.bound:
        return Result.PASS, "the whole interval meets it"
    if far is not None and sign * far > sign * slo.bound:
        return Result.FAIL, "the whole interval misses it"
    if near is None:
        # What serial correlation leaves unbounded is one observation, as a burst is.
        result, reason = _by_margin(slo, figure)
        decided = result == Result.PASS
        return (result, reason) if decided else (Result.INCONCLUSIVE, figure.note or reason)
    side = near if sign * figure.point <= sign * slo.bound else far
    if side is None or figure.point == slo.bound:
        return Result.INCONCLUSIVE, "the interval contains the limit: more requests would decide it"
    # An interval shrinks with the square root of the number of requests; the figure's n may be of tokens.
    many = planned * max(1.1, ((side - figure.point) / (slo.bound - figure.point)) ** 2)
    decided_by = f"about {float(f'{many:.2g}'):,.0f} requests" if many < 1e6 else "no realistic number"
    return Result.INCONCLUSIVE, f"the interval contains the limit: {decided_by} would decide it"


def _by_margin(slo: Slo, figure: Estimate, misses: Floats | None = None) -> tuple[Result, str]:
    """One run is one observation: it decides where its margin exceeds how far runs of one system differ.

    That is not known: identical bursts have differed by a quarter. Of a share the margin is that of the
    latencies behind it (`misses`; without them of the rest to 1), and as many requests drawn by chance must
    decide it too.
    """
    reading, n = figure.point, figure.n
    met = reading <= slo.bound if slo.op == "<=" else reading >= slo.bound
    result = Result.PASS if met else Result.FAIL
    if slo.metric.endswith("_bytes"):
        return result, "one value without an interval"
    ends = (reading, slo.bound)
    if slo.metric == ATTAINMENT:
        low, high = clopper_pearson(reading * n, n)
        if low < slo.bound <= high:
            return Result.INCONCLUSIVE, f"{n:,} requests are too few to decide it"
        ends = (1 - reading, 1 - slo.bound)
        if misses is not None:
            other = float((misses <= (1 / CERTAIN_MARGIN if met else CERTAIN_MARGIN)).mean())
            if (other >= slo.bound) == met:
                return result, f"one run {'meets' if met else 'misses'} it, whatever runs may differ"
            reason = f"at {'half' if met else 'twice'} the latency bounds it is {other:.4g}"
            return Result.INCONCLUSIVE, f"{reason}; another run may differ{slo.advice}"
    low, high = min(ends), max(ends)
    margin = f"by {abs(ends[0] / ends[1] - 1):.0%}" if low > 0 else "entirely"
    reason = f"one run {'meets' if met else 'misses'} it {margin}"
    if high >= CERTAIN_MARGIN * low and low < high:
        return result, reason
    return Result.INCONCLUSIVE, f"{reason}; another run may not{slo.advice}"


def _lies_among_failures(slo: Slo, c: Columns) -> bool:
    """Whether enough requests failed to make the percentile infinite for certain."""
    if slo.statistic is None or not slo.statistic.startswith("p") or not len(c):
        return False
    low_rank, _ = order_statistic_ranks(len(c), slo.p)
    return low_rank is not None and low_rank > int(c.ok.sum())


def bounds_of(slos: Sequence[Slo]) -> tuple[LatencyBound, ...]:
    """The bound of each SLO; WorkloadError for one that is not about the latency of single requests."""
    found = []
    for slo in slos:
        if slo.metric == ATTAINMENT and any(other.per_request for other in slos):
            found.append(LatencyBound(slo.text, slo.bound, 1.0))
        elif (slo.statistic or "").startswith("p") and METRICS[slo.metric].of is not None:
            found.append(LatencyBound(slo.text, slo.p, slo.bound))
        elif not slo.per_request:
            raise WorkloadError(
                f"--slo {slo.text!r}: a limit is searched for percentiles of requests' latencies, such as "
                "'ttft.p90<=500ms', and for attainment, such as 'ttft<=500ms' with 'attainment>=95%'"
            )
    if not found:
        also = " beside them, e.g. --slo 'attainment>=95%'" if slos else ", e.g. --slo 'ttft.p90<=500ms'"
        raise WorkloadError(f"--slo: a limit needs one that is about all requests{also}")
    for bound in found:
        if not bound.p < 1:
            raise WorkloadError(f"--slo {bound.text!r}: expected below 100%: no run can show that all do")
    return tuple(found)


def evidence_of(slos: Sequence[Slo], c: Columns, *, open_loop: bool) -> Evidence:
    """The evidence of these requests, which stand in the order they were due; see `Evidence`."""
    in_flight = None
    if open_loop:
        ended_s = np.sort(np.where(np.isnan(c.closed_s), np.inf, c.closed_s))
        in_flight = np.arange(len(c), dtype=np.float64) - np.searchsorted(ended_s, c.due_s)

    def latency(slo: Slo) -> Floats:
        of = METRICS[slo.metric].of
        assert of is not None
        return np.where(c.failed, np.inf, of(c))

    return Evidence(latencies_of(slos, latency), in_flight)


def latencies_of(slos: Sequence[Slo], latency: Callable[[Slo], Floats]) -> tuple[Floats, ...]:
    """What each of `bounds_of(slos)` bounds, for each request; `latency` is of an SLO's metric."""
    criteria = [slo for slo in slos if slo.per_request]

    def bounded(slo: Slo) -> Floats:
        if slo.metric != ATTAINMENT:
            return latency(slo)
        # By how much each request misses the criterion that it misses most: above 1 it misses one.
        return np.asarray(np.fmax.reduce([latency(each) / each.bound for each in criteria]))

    return tuple(bounded(slo) for slo in slos if slo not in criteria)
