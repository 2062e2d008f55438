"""What a run's page says of cause, limit and advice: which sentences, whether they hold, which contradict."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from itertools import combinations
from pathlib import Path
from typing import Final

import pyarrow as pa

from burstline.measure.record.rundir import open_run
from burstline.measure.record.summary import Summary
from burstline.measure.summarize import summarize_run
from burstline.reports import sentences
from burstline.reports.blocks import Banner
from burstline.reports.model.comparison import View, alone
from burstline.reports.page.answer import answer
from burstline.reports.page.digest import run_banner
from burstline.reports.page.first_screen import _trend, tiles
from tests.reports.predicates import PREDICATES, Told

ROOT: Final = Path(__file__).parents[2]
REASONS: Final = tomllib.loads((ROOT / "burstline/measure/record/reasons.toml").read_text("utf-8"))
SHARED: Final = REASONS.pop("shared")
"""What several of them say, by the name that stands for it."""
OF_SEVERAL: Final = frozenset(
    {"prompt-tokens", "output-tokens", "finish-reasons", "failures.differ", "prefix-cache.differ", "workload",
     "workload.varied", "unforced", "unchecked"}
)  # fmt: skip
"""Why runs cannot be compared: on no page of one run."""

CLIENTS: Final = frozenset({"send-lag", "slow-client", "read-lag", "read-lag.rates", "read-lag.median"})
REFUSED_USE: Final = frozenset(
    {"no-start", "died", "client-failed", "no-request", "no-success", "mostly-failed", "too-many-failures",
     "contradiction", "misread", "slow-client", "canary-lost", "read-unknown", "instrument-error", "use.none",
     *CLIENTS}
)  # fmt: skip
WAITED: Final = frozenset(
    {"limit.in-flight", "limit.overloaded", "limit.overloaded-batch", "limit.batch", "limit.kv-cache",
     "limit.token-budget", "limit.own-batch", "limit.queue", "limit.streams", "limit.listen-queue"}
)  # fmt: skip
HAD_ROOM: Final = frozenset(
    {"limit.load", "limit.concurrency", "limit.steps", "limit.gaps", "limit.pauses", "limit.one-in-flight",
     "limit.concurrency-unwatched"}
)  # fmt: skip
NOT_KNOWN: Final = frozenset({"limit.client", "limit.too-short", "limit.unsure", "limit.unknown"})
CONTRARY: Final[Mapping[str, Sequence[frozenset[str]]]] = {
    "the load should be": (
        frozenset({"NEXT.limit.concurrency", "NEXT.limit.one-in-flight", "next.slots"}),
        frozenset({"next.lower", "NEXT.limit.overloaded", "NEXT.limit.overloaded-batch",
                   "advice.lower-load", "overloaded", "overloaded.waiting", "died"}),
    ),
    "the limit": (WAITED, HAD_ROOM, NOT_KNOWN),
    "which limit": tuple(frozenset({code}) for code in sorted({*WAITED, *HAD_ROOM, *NOT_KNOWN})),
    "the server kept up": (
        frozenset({"limit.load", "NEXT.limit.load"}),
        frozenset({"overloaded", "overloaded.waiting", "mostly-failed", "no-success"}),
    ),
    "the load as asked was sent": (HAD_ROOM, frozenset({"slow-client", "limit.client"})),
    "the numbers can be used": (frozenset({"states.VALID", "use.all"}), REFUSED_USE),
    "nothing disturbed the run": (
        frozenset({"states.VALID"}),
        frozenset({"busy-machine", "busy-machine.elsewhere", "busy-machine.unwatched", "cpu-wait", "one-core",
                   "throttled", "gpu-throttled", "lossy-network", "too-short", "interrupted"}),
    ),
    "who took the CPU": (
        frozenset({"server-cpu"}),
        frozenset({"advice.stop-others", "busy-machine", "busy-machine.unwatched", "one-core"}),
    ),
    "what the KV cache holds": (
        frozenset({"next.all", "next.room", "limit.token-budget", "limit.batch"}),
        frozenset({"limit.kv-cache"}),
    ),
    "whether the KV cache has room": (
        frozenset({"next.all", "next.room"}),
        frozenset({"NEXT.limit.kv-cache"}),
    ),
    "hits of the prefix cache": (
        frozenset({"prefix-cache", "prefix-more"}),
        frozenset({"prefix-none", "prefix-none.simulated", "prefix-less", "prefix-off"}),
        frozenset({"prefix-unknown", "prefix-restarted", "prefix-restarted.again"}),
    ),
    "what hung up": tuple(frozenset({f"abandoned{how}"}) for how in ("", ".unknown", "-not-freed")),
    "the server's count": (
        frozenset({"metrics-incomplete"}),
        frozenset({"conservation", "conservation.failures"}),
    ),
    "the server's view": (frozenset({"server-view.shorter"}), frozenset({"server-view.longer"})),
    "how many succeeded": tuple(
        frozenset({code})
        for code in ("no-success", "mostly-failed", "too-many-failures", "no-start", "no-request")
    ),
    "TTFT over time": tuple(frozenset({f"trend.{way}"}) for way in ("rose", "fell", "none")),
    "an SLO was set": (
        frozenset({"no-slo"}), frozenset({"next.lower", "next.looser", "next.requests", "use.slos"}),
    ),
    "why requests failed": (frozenset({"advice.why-failed"}), frozenset({"no-start", "no-request"})),
}  # fmt: skip
"""Sentences that contradict each other: of a row's sets, codes of one at most may be said of a run."""
OF_THEMSELVES: Final = {
    "use.all": r"(?:numbers can be used\.)",
    "use.none": r"do not use (?:these numbers|them)|before you rely on them",
    "use.slos": r"SLOs: \d",
}
"""Words that stand in no table, by the code that CONTRARY has for them."""

LINES: Final[Mapping[str, str]] = {
    "advice.stop-others": r"[Ss]top other work on this machine",
    "advice.lower-load": r"[Ll]ower the load, or (?:raise the limit of the server's queue|give requests)",
    "advice.more-time": r"give requests more time with --deadline-s",
    "advice.rejected": r"the server rejected the requests themselves",
    "advice.one-stream": r"if it ends a stream when another begins",
    "advice.natural": r"if replies may end by themselves",
    "advice.first-failure": r"[Rr]ead the server's log at the time of the first failure",
    "advice.why-failed": r"Find out why requests failed",
    "used-by-others": r"Processes that Burstline did not start used",
    "slowest": r"The slowest 1% take at least",
    "cut-short": r"The run was interrupted after",
    "limit.ran": r"at most (?P<running>[\d,]+) of (?P<of>[\d,]+) requests ran at once.*the rest waited",
    "trend.rose": r"rose during the run",
    "trend.fell": r"fell during the run",
    "trend.none": r"shows no drift (during the run|after the warm-up)",
    "queue.rises": r"rises along the queue",
}
"""How to know the sentences that have no template."""


@cache
def _pattern(template: str) -> re.Pattern[str]:
    """What a template becomes with any values in it."""
    parts = re.split(r"\{(\w*)[^}]*\}", template)
    text, names = "", set()
    for k, part in enumerate(parts):
        if not k % 2:
            text += re.escape(part)
        else:
            within = r"(?:(?!\.\s).)*?"  # a value ends no sentence
            text += f"(?P<{part}>{within})" if part and part not in names else within
            names.add(part)
    text = re.sub("^Limited", "(?:were )?limited", text)
    return re.compile(text, re.IGNORECASE | re.DOTALL)


def _literal(template: str) -> int:
    return len(re.sub(r"\{[^}]*\}", "", template))


def _found(prefix: str, templates: Mapping[str, str], text: str) -> Iterator[tuple[str, Mapping[str, str]]]:
    """Each template that the text has; where two begin at one place, the one with more words of its own."""
    at: dict[int, tuple[int, str, Mapping[str, str]]] = {}
    for code, template in templates.items():
        for found in _pattern(template).finditer(text):
            values = {name: value or "" for name, value in found.groupdict().items()}
            row = (_literal(template), f"{prefix}{code}", values)
            at[found.start()] = max(at.get(found.start(), row), row, key=lambda each: each[0])
    for _, code, values in at.values():
        yield code, values


IN_ANSWERS: Final = {
    code: text
    for code, text in sentences.SENTENCES.items()
    if (code.startswith("limit.") and code not in ("limit.not-why", "limit.not-measured"))
    or code in ("not-reconciled", "no-slo", "rates.of-succeeded", "rates.few", "rates.apart", "tail.burst",
                "next.looser", "next.room", "next.all", "next.raise", "next.lower", "next.requests",
                "next.slots")
}  # fmt: skip


STEPS: Final = {code: text for text, code in {t: c for c, t in reversed(sentences.NEXT.items())}.items()}
"""What to try next; where several limits have the same advice, by the first of them."""


def said_in(text: str) -> Iterator[tuple[str, Mapping[str, str]]]:
    """The codes of all sentences in a text of a run's page, each with its values."""
    limits = {code: each for code, each in IN_ANSWERS.items() if code.startswith("limit.")}
    yield from _found("", limits, text)
    steps = {f"NEXT.{code}": each for code, each in STEPS.items()}
    steps |= {code: each for code, each in IN_ANSWERS.items() if code.startswith("next.")}
    yield from _found("", {code: f"Next: {each}" for code, each in steps.items()}, text)
    others = {c: t for c, t in IN_ANSWERS.items() if not c.startswith(("limit.", "next."))}
    yield from _found("", others, text)
    for code, pattern in LINES.items():
        for found in re.finditer(pattern, text):
            yield code, found.groupdict()


def said_by(banner: Banner) -> Iterator[tuple[str, Mapping[str, str]]]:
    """The codes of the state's sentence and of the reasons and warnings of a verdict."""
    meanings = {f"states.{code}": text for code, (_, _, text) in sentences.STATES.items()}
    meanings |= {f"meant_by.{code}": text for code, text in sentences.MEANT_BY.items()}
    own = [code for code, text in meanings.items() if banner.sentence.startswith(text)]
    codes = [reason.code for reason in banner.reasons]
    of = {code: code.rpartition(".")[2] for code in own}  # several may have the same words
    own.sort(key=lambda code: codes.index(of[code]) if of[code] in codes else len(codes))
    yield from ((code, {}) for code in own[:1])
    for reason in banner.reasons:
        names = [name for name in REASONS if name.partition(".")[0] == reason.code]
        texts = {name: whole(REASONS[name]["text"]) for name in names}
        fitting = [
            (name, found)
            for name in names
            if (found := _pattern(texts[name]).fullmatch(reason.text))
            and _pattern(whole(REASONS[name]["advice"])).search(reason.advice)
        ]
        if not fitting:
            continue
        name, found = max(fitting, key=lambda each: _literal(texts[each[0]]))
        values = found.groupdict()
        if started := re.search(
            r"(?:first )?(\d+) requests(?: after the first (\d+))?", values.get("size") or ""
        ):
            values |= {"n": started[1], "after": started[2] or "0"}
        yield name, values


def whole(template: str) -> str:
    """With what all reasons share filled in."""
    return re.sub(r"\{(\w+)\}", lambda found: SHARED.get(found[1], found[0]), template)


def texts_of(view: View, *, records: bool = True) -> tuple[Banner, list[str]]:
    """The verdict, and all other text of cause, limit and advice on a run's page and in its terminal."""
    banner = run_banner(view.summary)
    said = answer(alone(view))
    shown = [said.sentence, *said.details]
    for tile in tiles(view):
        step = "Next: " if tile.label == "What next?" else ""
        shown.append(f"{tile.label} {step}{tile.value}. {tile.detail}")
    shown += [_trend(view, "TTFT")] if records else []
    return banner, [*shown, banner.sentence, *(each.advice for each in banner.reasons)]


def judged(view: View, *, records: bool = True) -> tuple[list[str], list[str]]:
    """The codes of sentences that are said of a run and do not hold, and the pairs that contradict.

    `records` says whether they are the run's own.
    """
    banner, texts = texts_of(view, records=records)
    said = [*said_by(banner), *(each for text in texts for each in said_in(text))]
    facts = told(view, records=records)
    whole_text = "\n".join((*texts, *(each.text for each in banner.reasons)))
    codes = {code for code, _ in said}
    codes |= {code for code, pattern in OF_THEMSELVES.items() if re.search(pattern, whole_text)}
    contrary = [
        f"{what}: {', '.join(sorted(one & codes))} / {', '.join(sorted(other & codes))}"
        for what, sides in CONTRARY.items()
        for one, other in combinations(sides, 2)
        if one & codes and other & codes
    ]
    false = {code for code, values in said if not PREDICATES[code](replace(facts, said=values))}
    return sorted(false), contrary


def told(view: View, *, records: bool = True) -> Told:
    return Told(view.summary, view.manifest, view.run if records else None)


def false_in(folder: Path) -> list[str]:
    """What is false of a run's own page, or contradicts itself.

    Nothing where the folder makes no page, or has a verdict that its test wrote in place of the run's own.
    """
    try:
        run = open_run(folder)
        false, contrary = judged(View(run, run.summary)) if run.summary is not None else ([], [])
        is_planted = (false or contrary) and _reasons(run.summary) != _reasons(summarize_run(run))
    except (ValueError, OSError, KeyError, pa.ArrowException):  # damaged by its test
        return []
    return [] if is_planted else [*false, *contrary]


def _reasons(summary: Summary | None) -> list[str]:
    """The codes of a verdict but for what an audit and the hardware add to it."""
    reasons = (*summary.verdict.reasons, *summary.verdict.warnings) if summary else ()
    others = ("misread", "beats-the-ceiling", "replies-differ")
    return [each.code for each in reasons if each.code not in others]
