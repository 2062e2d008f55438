"""Lists in a suite's workload: one workload for each value, so that a load becomes a sweep."""

from __future__ import annotations

import re
from typing import Final

from burstline.suites.toml_table import TomlTable
from burstline.workloads.request import WorkloadError

LOADS: Final = ("concurrency", "rate")
"""The keys that name the workloads of a sweep before all others."""
NEVER_SWEPT: Final = ("slo",)
"""Keys that are lists by nature."""


def expanded(table: TomlTable) -> list[TomlTable]:
    """The workload itself, or one for each place in its lists, which go in step.

    `concurrency = [1, 8]` with `requests = [20, 160]` makes of "steady" the workloads "steady-concurrency1"
    of 20 requests and "steady-concurrency8" of 160. WorkloadError where the lists are not equally long.
    """
    lists = {k: v for k, v in table.raw.items() if isinstance(v, list) and k not in NEVER_SWEPT}
    if not lists:
        return [table]
    lengths = {len(values) for values in lists.values()}
    if len(lengths) > 1 or 0 in lengths:
        told = ", ".join(f"{key} has {len(values)}" for key, values in lists.items())
        raise WorkloadError(f"{table.where}: lists go in step and must be equally long; {told} values")
    name = table.need("name", str)
    naming = next((key for key in LOADS if key in lists), next(iter(lists)))
    return [
        TomlTable(
            {
                **table.raw,
                **{key: values[k] for key, values in lists.items()},
                "name": f"{name}-{naming}{re.sub(r'[^A-Za-z0-9._-]+', '-', str(value)).strip('-')}",
            },
            f"{table.where}, {naming} = {value}",
        )
        for k, value in enumerate(lists[naming])
    ]
