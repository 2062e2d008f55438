"""A run in the formats of other programs, as the bytes of files."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from loadgen.record.rundir import Run


def _parquet(run: Run) -> dict[str, bytes]:
    import io

    import pyarrow.parquet as pq

    out = io.BytesIO()
    pq.write_table(run.record_table, out, compression="zstd")
    return {"records.parquet": out.getvalue()}


def _csv(run: Run) -> dict[str, bytes]:
    from reports.formats.csv import records_csv

    return {"records.csv": records_csv(run)}


def _markdown(run: Run) -> dict[str, bytes]:
    from reports.digest import pull_request
    from reports.formats.markdown import markdown
    from reports.run_view import view_of

    return {"summary.md": markdown(pull_request(view_of(run))).encode()}


def _junit(run: Run) -> dict[str, bytes]:
    from reports.formats.junit import junit

    return {"junit.xml": junit(run).encode()}


def _trace(run: Run) -> dict[str, bytes]:
    from reports.formats.trace_events import trace_json
    from reports.run_view import view_of

    return {"trace.json": trace_json(view_of(run))}


def _figures(run: Run) -> dict[str, bytes]:
    from reports.page.figure_files import figure_files
    from reports.run_view import view_of

    return {f"figures/{name}": content for name, content in figure_files(view_of(run)).items()}


FILES: Final[dict[str, Callable[[Run], dict[str, bytes]]]] = {
    "parquet": _parquet,
    "csv": _csv,
    "markdown": _markdown,
    "junit": _junit,
    "trace": _trace,
    "figures": _figures,
}
"""By format, what makes its files: their contents by name."""
