"""Burstline benchmarks LLM inference servers and compares the result with the hardware's roofline."""

import importlib

__version__ = "0.1.0"

_FROM = {
    **dict.fromkeys(
        ("Bound", "Compared", "Figure", "LoadedRun", "bound", "compare", "gate", "limit", "load", "run"),
        "api",
    ),
    "GateResult": "suites.gate",
    "LimitResult": "reports.page.limit_page",
    "Snapshot": "bench.progress",
    "Engine": "servers.engine",
    "EngineError": "servers.messages",
    "WorkloadError": "workloads.request",
    "RooflineError": "errors",
}
"""The public names and their modules, imported on first use; their types stand in `__init__.pyi`."""


def __getattr__(name: str) -> object:
    if name not in _FROM:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_FROM[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_FROM})
