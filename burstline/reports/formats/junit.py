"""The verdict and the targets as JUnit XML: one test case each, for a CI that shows them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from xml.etree import ElementTree as ET

from burstline.measure.metrics.slo import state_decides
from burstline.measure.record.summary import Summary
from burstline.measure.record.verdict import TargetResult
from burstline.measure.stats.figure import Absent
from burstline.reports.model.comparison import View
from burstline.reports.number_format import with_interval

CASE = {"fail": "failure", "inconclusive": "error"}
"""An inconclusive target is an error: CI must not pass on an inconclusive result."""


@dataclass(frozen=True, slots=True)
class JUnitCase:
    """One case: what is tested, and how it came out; `kind` is "failure" or "error", None where it passed."""

    classname: str
    name: str
    kind: str | None
    message: str = ""
    type: str = ""
    text: str = ""


def junit(view: View) -> str:
    """One suite named after the run; a target missed is a failure.

    A verdict other than VALID is an error. Targets follow the grade of their own metric: beside them only a
    FAILED run is one.
    """
    summary = view.summary
    state = summary.verdict.state
    reasons = "\n".join(f"{r.text} {r.advice}".strip() for r in summary.verdict.reasons)
    if state_decides(summary):
        verdict = JUnitCase("burstline", "verdict", "error", state, state, reasons)
    else:
        verdict = JUnitCase("burstline", "verdict", None, text=f"{state}: {reasons}" if reasons else "")
    timestamp = view.manifest.clock.utc[:19] if view.manifest.clock else ""
    cases = (verdict, *map(_target, summary.targets))
    return junit_suite(view.name, cases, lasted_s=_lasted_s(summary), timestamp=timestamp)


def junit_suite(name: str, cases: Sequence[JUnitCase], *, lasted_s: float, timestamp: str) -> str:
    kinds = [case.kind for case in cases]
    suite = ET.Element(
        "testsuite",
        name=name,
        tests=str(len(cases)),
        failures=str(kinds.count("failure")),
        errors=str(kinds.count("error")),
        skipped="0",
        time=f"{lasted_s:.3f}",
        timestamp=timestamp,
    )
    for case in cases:
        node = ET.SubElement(suite, "testcase", classname=case.classname, name=case.name)
        if case.kind:
            ET.SubElement(node, case.kind, message=case.message, type=case.type).text = case.text
        elif case.text:
            ET.SubElement(node, "system-out").text = case.text
    ET.indent(suite)
    root = ET.tostring(suite, encoding="unicode", xml_declaration=False)
    return f'<?xml version="1.0" encoding="UTF-8"?>\n{root}\n'


def _target(target: TargetResult) -> JUnitCase:
    measured = f"measured {with_interval(target.measured)}"
    if kind := CASE.get(target.result):
        message = f"{target.result}: {measured}"
        return JUnitCase("burstline.target", target.target, kind, message, target.result, target.reason)
    return JUnitCase("burstline.target", target.target, None, text=measured)


def _lasted_s(summary: Summary) -> float:
    start, end = summary.window.start_s, summary.window.end_s
    return 0.0 if isinstance(start, Absent) or isinstance(end, Absent) else end.point - start.point
