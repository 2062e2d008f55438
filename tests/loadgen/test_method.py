"""docs/method.md says what the code does: its table of metrics is made from the code's own."""

from pathlib import Path

from loadgen.metrics.definitions import METRICS

METHOD = Path(__file__).parents[2] / "docs" / "method.md"
BEGIN, END = "<!-- metrics: begin -->\n", "<!-- metrics: end -->"


def table() -> str:
    rows = ["| name | in summary.json | unit | formula | what to know | as in |", "|---|---|---|---|---|---|"]
    rows += [
        f"| {m.title} | `{name}` | {m.unit} | {m.formula} | {m.note} | {m.source} |".replace("| |", "|  |")
        for name, m in METRICS.items()
    ]
    return "\n".join(rows) + "\n"


def test_the_table_of_metrics_is_the_codes_own():
    text = METHOD.read_text()
    assert text[text.index(BEGIN) + len(BEGIN) : text.index(END)] == table(), f"expected\n{table()}"
