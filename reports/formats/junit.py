"""The verdict and the targets as JUnit XML: one test case each, for a CI that shows them."""

from __future__ import annotations

from xml.etree import ElementTree as ET

from burstline.loadgen.metrics.slo import state_decides
from burstline.loadgen.record.summary import Summary
from burstline.loadgen.record.verdict import TargetResult
from burstline.loadgen.stats.figure import Absent
from burstline.reports.model.comparison import View
from burstline.reports.number_format import with_interval

CASE = {"fail": "failure", "inconclusive": "error"}
"""An inconclusive target is an error: CI must not pass on an inconclusive result."""


def junit(view: View) -> str:
    """One suite named after the run; a target missed is a failure.

    A verdict other than VALID is an error. Targets follow the grade of their own metric: beside them only a
    FAILED run is one.
    """
    summary = view.summary
    targets = summary.targets
    state = summary.verdict.state
    usable = not state_decides(summary)
    missed = sum(target.result == "fail" for target in targets)
    errors = sum(target.result == "inconclusive" for target in targets) + (not usable)
    suite = ET.Element(
        "testsuite",
        name=view.name,
        tests=str(1 + len(targets)),
        failures=str(missed),
        errors=str(errors),
        skipped="0",
        time=f"{_lasted_s(summary):.3f}",
        timestamp=view.manifest.clock.utc[:19] if view.manifest.clock else "",
    )
    verdict = ET.SubElement(suite, "testcase", classname="burstline", name="verdict")
    reasons = "\n".join(f"{r.text} {r.advice}".strip() for r in summary.verdict.reasons)
    if not usable:
        ET.SubElement(verdict, "error", message=state, type=state).text = reasons
    elif reasons:
        ET.SubElement(verdict, "system-out").text = f"{state}: {reasons}"
    for target in targets:
        _target(suite, target)
    ET.indent(suite)
    root = ET.tostring(suite, encoding="unicode", xml_declaration=False)
    return f'<?xml version="1.0" encoding="UTF-8"?>\n{root}\n'


def _target(suite: ET.Element, target: TargetResult) -> None:
    case = ET.SubElement(suite, "testcase", classname="burstline.target", name=target.target)
    measured = f"measured {with_interval(target.measured)}"
    if kind := CASE.get(target.result):
        message = f"{target.result}: {measured}"
        ET.SubElement(case, kind, message=message, type=target.result).text = target.reason
    else:
        ET.SubElement(case, "system-out").text = measured


def _lasted_s(summary: Summary) -> float:
    start, end = summary.window.start_s, summary.window.end_s
    return 0.0 if isinstance(start, Absent) or isinstance(end, Absent) else end.point - start.point
