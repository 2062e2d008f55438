"""A run's page, and what it says first."""

from loadgen.record.rundir import Run
from loadgen.record.summary import Summary
from reports.blocks import Answer, Banner
from reports.model.comparison import View, alone, view_of
from reports.page.answer import answer
from reports.page.banner import banner
from reports.page.page import render


def page_of(run: Run) -> str:
    return render(alone(view_of(run)))


def answer_of(run: Run, summary: Summary) -> Answer:
    return answer(alone(View(run, summary)))


def banner_of(run: Run, summary: Summary) -> Banner:
    return banner(alone(View(run, summary)))
