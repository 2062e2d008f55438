"""A comparison for machines."""

from __future__ import annotations

from typing import Any

from burstline.reports.model.comparison import HEADLINES, Case, Comparison
from burstline.reports.model.sweeps import sweeps_in
from burstline.reports.page.banner import case_state
from burstline.reports.page.side_by_side import contrast_json
from burstline.reports.page.sweep_words import sweep_json


def comparison_json(comparison: Comparison) -> dict[str, Any]:
    """Each case's state, reasons, facts and figures, and every sweep."""
    return {
        "title": comparison.title,
        "comparable": comparison.comparable,
        "cells": [_case(case) for case in comparison.cases],
        "sweeps": [sweep_json(sweep) for sweep, _ in sweeps_in(comparison.cases)],
        "missing": list(comparison.missing),
        "others": [
            {"name": each.name, "tool": each.tool, "numbers": dict(each.numbers)}
            for each in comparison.others
        ],
    }


def _case(case: Case) -> dict[str, Any]:
    return {
        "name": case.name,
        "state": case_state(case),
        "reasons": [reason.to_json() for reason in case.gate.reasons],
        "warnings": [reason.to_json() for reason in case.gate.warnings],
        "facts": [
            {"name": f.name, "values": dict(f.values), "agrees": f.agrees, "tolerance": f.tolerance}
            for f in case.gate.facts
        ],
        "numbers": {
            headline.title: {each.label: each.figure(*headline.path).to_json() for each in case.contenders}
            for headline in HEADLINES
        },
        "contrasts": [contrast_json(pair, contrasts) for pair, contrasts in case.contrasts.items()],
        "best": {headline.title: case.best(headline) for headline in HEADLINES},
        "runs": {each.label: [view.name for view in each.views] for each in case.contenders},
    }
