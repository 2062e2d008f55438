"""The page of a search for the highest load: the answer, latency against load, the probes in order."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, NamedTuple

from burstline.measure.metrics.slo import parse_slo
from burstline.measure.record.rundir import Run, open_run
from burstline.measure.record.typed_json import from_fields, plain
from burstline.measure.record.verdict import QUEUE_GREW, Reason, State, Verdict
from burstline.measure.stats.figure import Estimate, Result
from burstline.measure.stats.limit_search import MOST_LOST, Found, LoadProbe, ProbeLook, leaning
from burstline.reports.blocks import (
    MARKS,
    Answer,
    Banner,
    Block,
    Cell,
    Command,
    Note,
    Plot,
    Table,
    Tile,
    table,
)
from burstline.reports.figures.drawing import WIDE
from burstline.reports.figures.scatter import Region
from burstline.reports.model.comparison import OUTPUT, view_of
from burstline.reports.model.sweep_load import KINDS, SweepLoad, load_range
from burstline.reports.number_format import count, duration, number
from burstline.reports.page.answer import rates
from burstline.reports.page.bottleneck import limit_at, limited_by, out_of_reach
from burstline.reports.page.compared import AtLoad, load_figure
from burstline.reports.page.estimate_tables import title_of
from burstline.reports.page.first_screen import next_tile, speed
from burstline.reports.page.page import Page, PageSection, beside
from burstline.reports.page.sweep_words import slo_words, slos_words
from burstline.reports.sentences import LIMITS, SEARCH, say, say_next
from burstline.servers.registry import ENGINES
from burstline.wording import counted
from burstline.workloads.arrivals import ARRIVALS

RESULT: Final = "limit.json"
"""A search's file, in a folder beside those of its runs."""
CURVES: Final = {Result.PASS: "all SLOs hold", Result.FAIL: "an SLO is missed"}
NOTABLE: Final = 0.1
"""A latency that changed by more over a probe is why its requests say little."""


@dataclass(frozen=True, slots=True)
class LimitResult:
    """A search that has ended: what it found, and the folder of each probe's run, in order.

    `kind` is a key of KINDS, `verdicts` are those of the runs; `more_s` is about how much longer the search
    would take, None where more time would not help: then `why` says what happened, `advice` what to do.
    `again` is the command that searches again.
    """

    engine: str
    kind: str
    targets: tuple[str, ...]
    budget_s: float
    found: Found
    more_s: float | None
    runs: tuple[str, ...]
    verdicts: tuple[str, ...] = ()
    why: str = ""
    again: str = ""
    advice: str = ""

    @property
    def state(self) -> str:
        """A key of SEARCH."""
        if self.found.none_holds:
            return "none"
        open_ = "lost" if self.found.is_lost else "open"
        return open_ if self.found.high is None else "confirmed"

    def load(self, value: float) -> SweepLoad:
        return SweepLoad(self.kind, round(value) if self.kind == "concurrency" else float(f"{value:.3g}"))

    def to_json(self) -> dict[str, Any]:
        return {"state": self.state, "answer": answer_of(self).sentence, **plain(self)}

    def page(self, folder: Path) -> str:
        return limit_page(self, [open_run(folder.parent / name) for name in self.runs])

    @classmethod
    def from_json(cls, row: dict[str, Any]) -> LimitResult:
        return from_fields(cls, {key: row[key] for key in row if key not in ("state", "answer")})


class _Words(NamedTuple):
    """What a search says: its answer and what that rests on, what limited the lowest load that misses (in two
    or three words, and in a sentence), and what to do next."""

    sentence: str
    basis: str
    limited_by: str
    limit: str
    then: str


def answer_of(result: LimitResult, runs: Sequence[Run] = ()) -> Answer:
    sentence, basis, _, *rest = _words_of(result, runs)
    return Answer(sentence, tuple(filter(None, (basis, *rest))))


def _words_of(result: LimitResult, runs: Sequence[Run]) -> _Words:
    found, who = result.found, _title(result.engine)
    (held, is_held), (missed, is_missed) = _judged_ends(found)
    least = min((probe.load for probe in found.probes), default=None)
    ends = {"held": held, "missed": missed, "low": found.low, "high": found.high, "least": least}
    loads = {what: str(result.load(load)) for what, load in ends.items() if load is not None}
    loads["holds"] = "holds" if is_held else "seems to hold"
    loads["misses"] = "misses" if is_missed else "seems to miss"
    lost = Counter(probe.lost for probe in found.probes if probe.lost)
    valid = "; each is VALID" if set(result.verdicts) == {State.VALID} else ""
    if lost:
        valid = say("highest.lost", n=counted(lost.total(), "other"), states=", ".join(lost))
    looks = [probe.last for probe in found.probes if not probe.lost]
    judged = [max((share.n or look.n for share in look.shares), default=0) for look in looks]
    n, probes = counted(sum(judged), "judged request"), counted(len(looks), "probe")
    basis, code, limit, then, looser = say("highest.basis", probes=probes, n=n, valid=valid), "", "", "", ""
    told_open = f"{result.why} {result.advice}".strip()
    if probed := _probe_at(missed, result, runs):
        view = view_of(probed[1])
        code = limited_by(view.summary, view.manifest)[0]
        limit, then = limit_at(str(result.load(probed[0].load)), view)
        looser = say_next(out_of_reach(view))
    if found.none_holds or found.none_seems:
        none = "highest.none" if found.none_holds else "highest.none-seen"
        sentence = say(none, who=who, slo=slo_words(parse_slo(found.worst.text)), **loads)
        then = told_open or looser or say("highest.change" if found.none_holds else "highest.lower")
    elif result.state == "confirmed":
        slos = slos_words(bound.text for bound in found.bounds)
        sentence = say("highest.found", who=who, slos=slos, error=f"{100 * found.error:.3g}%", **loads)
    else:
        between = "highest.above" if held else "highest.below" if missed else "highest.unknown"
        if held and missed:
            between = "highest.between" if held < missed else "highest.unknown"
        sure = say("highest.sure", **loads) if "low" in loads else ""
        known, then = say(between, **loads), told_open or say("highest.longer")
        sentence = say("highest.open", who=who, known=known, sure=sure)
        if not told_open and result.more_s is not None:
            more = {"more": number(found.more_requests or 0), "more_s": duration(result.more_s)}
            step = "highest.far" if held and result.more_s > 10 * result.budget_s else "highest.more"
            then = say(step, **loads, budget=math.ceil((result.budget_s + result.more_s) / 10) * 10, **more)
    return _Words(sentence, basis, LIMITS.get(code, ""), limit, then)


def why_open(found: Found, runs: Sequence[Run]) -> tuple[str, str]:
    """Why more requests would not settle it, and what to do; both "" where they would.

    In an open loop a queue may be why a latency changed.
    """
    verdicts = [run.summary.verdict if run.summary else Verdict(State.FAILED) for run in runs]
    if found.is_lost:
        last = found.probes[-MOST_LOST:]
        states = ", ".join(dict.fromkeys(probe.lost for probe in last))
        why, advice = _told(verdicts[len(found.probes) - 1])
        return say("highest.repeated", n=len(last), states=states, why=why).strip(), advice
    if found.high is not None or found.nearest is None:
        return "", ""
    probe, verdict = found.probes[found.nearest - 1], verdicts[found.nearest - 1]
    change, is_closed = probe.last.change, runs[probe.number - 1].manifest.asked.concurrency is not None
    if State.NOT_STATIONARY in (verdict.state, *(verdict.also or ())) and not verdict.has(QUEUE_GREW):
        why, advice = _told(verdict)
    elif is_closed and abs(change) >= NOTABLE:
        why = say("highest.rose" if change > 0 else "highest.fell", percent=f"{abs(change):.0%}")
        advice = say("highest.rose-next" if change > 0 else "highest.fell-next")
    else:
        return "", ""
    return say("highest.changed", number=probe.number, why=why), advice


def _told(verdict: Verdict) -> tuple[str, str]:
    reason = next(iter((*verdict.reasons, *verdict.warnings)), Reason("", "", ""))
    return reason.text, reason.advice


def limit_blocks(result: LimitResult, runs: Sequence[Run] = ()) -> list[Block]:
    """What a terminal shows: the answer and the probes."""
    return [answer_of(result, runs), _probes(result)]


def _undecided(look: ProbeLook) -> str:
    """Why a probe that counts decided nothing, where its requests depend on each other."""
    least = min((share.n_effective for share in look.shares), default=look.n)
    if look.judged != Result.INCONCLUSIVE or least >= look.n / 2:
        return ""
    return say("highest.row-few", n=count(round(least)))


def limit_page(result: LimitResult, runs: Sequence[Run]) -> str:
    """The verdict, the four answers, latency and output against load; folded the probes."""
    view, words, blocks = view_of(runs[0]), _words_of(result, runs), limit_blocks(result, runs)
    asked = view.manifest.asked
    facts = [f"{asked.prompt_tokens} → {asked.output_tokens} tokens"]
    facts += [ARRIVALS[asked.pattern].title if result.kind == "rate" else "closed loop"]
    state, tone, mark, code = SEARCH[result.state]
    # Why the probes could not decide says more than that they could not.
    meant = Reason(result.state, result.why or say(code, budget=duration(result.budget_s)), "")
    limit = Tile("What limits it?", words.limited_by, words.limit)
    then = next_tile(result.advice or ("" if words.then == result.why else words.then))
    tiles = _how_fast(result, runs), _load(result, runs, words), limit, then
    sections = [PageSection("probes", "Probes", "What was probed, in order?", blocks[1:], folded=True)]
    if result.again:
        reproduce = Command("Reproduce this search", result.again)
        sections.append(PageSection("again", "Reproduce", "Reproduce this search", [reproduce]))
    return Page(
        title=f"Highest load with {slos_words(result.targets)}: {_title(result.engine)}",
        facts=(*facts, f"search budget {duration(result.budget_s)}", *filter(None, view.facts.values())),
        verdict=Banner(state, tone, mark, words.sentence, (meant,)),
        tiles=[tile for tile in tiles if tile.value],
        pictures=beside(list(_plots(result, runs))),
        sections=sections,
        summary=[result.to_json()],
        digest=blocks,
    ).html()


def _how_fast(result: LimitResult, runs: Sequence[Run]) -> Tile:
    """The medians and p90 at the highest load that holds, else at the lowest that misses."""
    low, high = _ends(result)
    probed = _probe_at(high if low is None else low, result, runs)
    if probed is None:
        return Tile("How fast?", "", "")
    view, missed = view_of(probed[1]), ", which misses" if low is None else ""
    slow = speed(view, "p90")
    detail = f"Medians at {result.load(probed[0].load)}{missed}.{f' p90: {slow}.' if slow else ''}"
    return Tile("How fast?", speed(view, "p50"), detail)


def _load(result: LimitResult, runs: Sequence[Run], words: _Words) -> Tile:
    """Between which loads the limit lies, what was served at the lower one, and what that rests on."""
    low, high = (None if end is None else result.load(end) for end in _ends(result))
    value = f"Above {low}" if low else f"Below {high}" if high else "Unknown"
    if low and high:
        value = load_range(low, high) if low < high else "Unknown"
    probed = _probe_at(low.value, result, runs) if low else None
    served = f"{rates(view_of(probed[1]))} at {low}. " if probed else ""
    return Tile("At what load?", value, f"{served}{words.basis}")


def _title(engine: str) -> str:
    return ENGINES[engine].title if engine in ENGINES else engine


Searches = Sequence[tuple[str, str, LimitResult]]
"""Several searches: of each its name, where its page is and what it found."""


def limits_blocks(searches: Searches) -> tuple[Answer, Table]:
    """What a terminal shows of several searches: the load that each found to hold, and all in a table."""
    rows: list[tuple[str | Cell, ...]] = []
    parts = []
    for name, href, each in searches:
        low, high = ("–" if end is None else str(each.load(end)) for end in (each.found.low, each.found.high))
        state, key = SEARCH[each.state][0], f"{name}/limit"
        ends = Cell(low, key=f"{key}.low"), Cell(high, key=f"{key}.high")
        rows.append((Cell(name, href=href), *ends, slos_words(each.targets), state))
        parts.append(f"{name} {'none' if each.found.low is None else low} ({state.lower()})")
    columns = ("Search", "Holds", "Misses", "SLOs", "Result")
    found = table("The highest load within the SLOs", columns, rows, text=(0, 3, 4))
    return Answer(say("highest.several", loads="; ".join(parts))), found


def limits_page(title: str, searches: Searches, missing: Sequence[str]) -> str:
    """One page over several searches; each links to its own."""
    answer, found = limits_blocks(searches)
    shown: list[Block] = [found, *(Note(say("missing", what=what)) for what in missing)]
    results = [each for *_, each in searches]
    worst = max((each.state for each in results), key=list(SEARCH).index, default="open")
    state, tone, mark, code = SEARCH[worst]
    budgets = dict.fromkeys(duration(each.budget_s) for each in results if each.state == worst)
    return Page(
        title=title,
        facts=(),
        verdict=Banner(state, tone, mark, say(code, budget=" or ".join(budgets)), ()),
        sections=[PageSection("limits", "Limits", "Which load holds the SLOs?", shown)],
        summary=[each.to_json() for each in results],
        digest=[answer, *shown],
        answer=answer,
    ).html()


def _ends(result: LimitResult) -> tuple[float | None, float | None]:
    """Between which loads the limit lies: the interval found, else the ends of `_judged_ends`."""
    (held, _), (missed, _) = _judged_ends(result.found)
    return (held, missed) if result.state in ("open", "lost") else (result.found.low, result.found.high)


def _judged_ends(found: Found) -> Iterator[tuple[float | None, bool]]:
    """The highest load that holds and the lowest that misses; with False where probes only lean to it."""
    for result, of in ((Result.PASS, max), (Result.FAIL, min)):
        judged = [probe.load for probe in found.probes if probe.last.judged == result]
        leans = (probe.load for probe in found.probes if leaning(probe.last, found.bounds) == result)
        yield of(judged or leans, default=None), bool(judged)


def _probe_at(load: float | None, result: LimitResult, runs: Sequence[Run]) -> tuple[LoadProbe, Run] | None:
    """The last probe at a load, one that counts if there is any, and its run."""
    at = [pair for pair in zip(result.found.probes, runs, strict=False) if pair[0].load == load]
    return max(at, key=lambda pair: (not pair[0].lost, pair[0].number), default=None)


def _plots(result: LimitResult, runs: Sequence[Run]) -> Iterator[Plot]:
    """Each latency with an SLO, else E2E, of each probe against its load, and the output below it."""
    low, high = _ends(result)
    bracket = (low, high) if low is not None and high is not None and low < high else None
    slos = [slo for slo in map(parse_slo, result.targets) if slo.statistic is not None]
    probed = [pair for pair in zip(result.found.probes, runs, strict=False) if pair[1].summary is not None]
    load = KINDS[result.kind][0].lower()
    for slo in slos or [parse_slo("e2e.p90<=1s")]:
        metric, p, text = slo.metric, str(slo.statistic), slo_words(slo) if slos else ""
        region = Region(None, slo.bound if slos else None, text, slo.op == "<=", bracket)
        paths = [*(("metrics", metric, each) for each in dict.fromkeys((p, "p50"))), OUTPUT.path]
        rows = []
        for probe, run in probed:
            key, summary = f"limit.probe.{probe.number}", view_of(run).summary
            figures = [(summary.figure(*path), f"{key}.{'.'.join(path[1:])}") for path in paths]
            curve = "does not count" if probe.lost else CURVES.get(probe.last.judged, "inconclusive")
            undecided = probe.last.judged == Result.INCONCLUSIVE
            if isinstance(figures[0][0], Estimate):
                at, word = result.load(probe.load), str(probe.number)
                rows.append(AtLoad(at, curve, "p50", figures, undecided, word, f"{key}.load"))
        if rows:
            names = ["Probe", f"{title_of(metric)} {p}", *["p50"] * (p != "p50"), f"{OUTPUT.title} (tok/s)"]
            told = f"{names[1]} against {load}", say("load.figure", latency=names[1], load=load)
            plot = load_figure(f"limit-{metric}-{p}", *told, names, rows, region, WIDE)
            yield replace(plot, explained=say("load.explained"))


def _probes(result: LimitResult) -> Table:
    slos = (replace(parse_slo(bound.text), statistic=None) for bound in result.found.bounds)
    load = KINDS[result.kind][1].replace("{}", "").strip().capitalize()  # all columns fit a terminal
    columns = ("Probe", load, "Purpose", "Result", *(slo_words(slo).replace("≤", ">") for slo in slos))
    states = dict(zip(result.runs, result.verdicts, strict=False))
    rows: list[Sequence[str | Cell]] = []
    for probe, run in zip(result.found.probes, result.runs, strict=False):
        late = [(f"{s.beyond:.1%}", f"of {count(s.n)}" if s.n else "") for s in probe.last.shares]
        late = late or [("–", "")] * len(result.found.bounds)
        state = states.get(run, State.VALID)
        why = f"{state}: still counts" if state != State.VALID else ""
        why = "the queue outgrew the server" if probe.last.overloaded else why or _undecided(probe.last)
        why = f"{probe.lost}: does not count" if probe.lost else why
        key = f"limit.probe.{probe.number}"
        at = Cell(result.load(probe.load).number, key=f"{key}.load")
        number = Cell(str(probe.number), href=f"../{run}/report.html")
        ended = Cell(f"{MARKS[probe.last.judged]} {probe.last.judged}", detail=why)
        each = (Cell(share, of, key=f"{key}.share.{k}") for k, (share, of) in enumerate(late))
        rows.append((number, at, probe.purpose.name.lower(), ended, *each))
    rule = say("highest.rule", error=f"{100 * result.found.error:.3g}%")
    return table("All probes in order", columns, rows, text=(2, 3), remark=rule)
