"""The imports of a run's own process, which it makes in two threads."""

import importlib
import os
import subprocess
import sys
import threading
from types import SimpleNamespace

import pytest

from burstline import lean

IMPORTED = """
import os, sys
from burstline.lean import import_numpy
import_numpy()
print("numpy" in sys.modules, len(os.listdir("/proc/self/task")), os.environ.get("OPENBLAS_NUM_THREADS"))
"""


@pytest.mark.skipif(sys.platform != "linux" or os.cpu_count() == 1, reason="counts threads as Linux does")
@pytest.mark.parametrize(("asked", "threads"), [(None, "1"), ("2", "2")])
def test_numpy_starts_no_threads_unless_it_was_asked_to_and_nobody_inherits_that(asked, threads):
    env = {name: value for name, value in os.environ.items() if not name.endswith("_NUM_THREADS")}
    env |= {"OPENBLAS_NUM_THREADS": asked} if asked else {}
    done = subprocess.run(
        [sys.executable, "-c", IMPORTED], env=env, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["True", threads, str(asked)]


def test_one_thread_at_a_time_imports_the_report(monkeypatch):
    inside, most = [], []

    def import_module(name):
        inside.append(threading.get_ident())
        most.append(len(set(inside)))
        threading.Event().wait(0.002)  # lets the other go on
        inside.remove(threading.get_ident())
        return importlib.import_module(name)

    monkeypatch.setattr(lean, "importlib", SimpleNamespace(import_module=import_module))
    threads = [threading.Thread(target=lean.import_report) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert max(most) == 1
