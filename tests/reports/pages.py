"""A run's page, and what it says first."""

from burstline.measure.record.rundir import Run
from burstline.measure.record.summary import Summary
from burstline.reports.blocks import Answer, Banner
from burstline.reports.model.comparison import View, alone, view_of
from burstline.reports.page.answer import answer
from burstline.reports.page.digest import banner
from burstline.reports.page.page import render


def page_of(run: Run) -> str:
    return render(alone(view_of(run)))


def answer_of(run: Run, summary: Summary) -> Answer:
    return answer(alone(View(run, summary)))


def banner_of(run: Run, summary: Summary) -> Banner:
    return banner(alone(View(run, summary)))
