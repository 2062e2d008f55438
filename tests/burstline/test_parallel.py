"""Work that two processes share."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from burstline import parallel
from burstline.parallel import share

HERE = os.getpid()


@pytest.fixture(autouse=True)
def _may_fork(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parallel, "can_fork", lambda: True)


def test_two_processes_work_at_the_same_time_and_results_keep_their_order(tmp_path: Path) -> None:
    def meet(own: int) -> str:
        tmp_path.joinpath(f"{own}").touch()
        while not tmp_path.joinpath(f"{1 - own}").exists():  # until the other job has begun
            time.sleep(0.001)
        return f"{own}"

    assert share([lambda: meet(0), lambda: meet(1), lambda: "2"]) == ["0", "1", "2"]


def test_what_the_other_process_cannot_do_is_done_here() -> None:
    def only_here() -> str:
        assert os.getpid() == HERE
        return "done"

    assert share([only_here] * 20) == ["done"] * 20


@pytest.mark.parametrize("end", [lambda: 1 / 0, lambda: os._exit(3) if os.getpid() != HERE else 1 / 0])
def test_a_job_that_fails_raises_here_and_leaves_no_process(end: Callable[[], str]) -> None:
    with pytest.raises(ZeroDivisionError):
        share([end, end, end])
    assert not [left for left in psutil.Process().children() if left.status() == psutil.STATUS_ZOMBIE]


def _fail() -> int:
    raise OSError("out of memory")


@pytest.mark.parametrize(
    ("where", "name", "instead"), [(parallel, "can_fork", lambda: False), (os, "fork", _fail)]
)
def test_one_process_does_it_where_there_can_be_no_other(
    monkeypatch: pytest.MonkeyPatch, where: object, name: str, instead: Callable[[], object]
) -> None:
    monkeypatch.setattr(where, name, instead)
    assert share([lambda: str(os.getpid())] * 3) == [str(HERE)] * 3
