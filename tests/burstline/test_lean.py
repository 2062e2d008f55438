"""The imports of a run's own process, which it makes in two threads."""

import importlib
import threading
from types import SimpleNamespace

from burstline import lean


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
