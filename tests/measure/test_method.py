"""docs/method.md says what the code does: its table of metrics is made from the code's own."""

import re
from pathlib import Path

from burstline.console import exit_codes
from burstline.measure.metrics.definitions import METRICS
from burstline.measure.record.verdict import State
from tests.pitfalls.test_mutations import MUTATIONS

ROOT = Path(__file__).parents[2]
METHOD, README = ROOT / "docs" / "method.md", ROOT / "README.md"
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


def test_the_states_that_the_page_lists_are_the_codes_own_in_their_order():
    text = METHOD.read_text()
    listed = text[text.index("The verdict of a run is one of these") : text.index("**The canary**")]
    assert re.findall(r"\*\*([A-Z-]+)\*\*", listed) == [str(state) for state in State]


def test_the_readme_has_every_exit_code_and_no_other_and_names_no_state_that_does_not_exist():
    text = README.read_text()
    table = text[text.index("## Exit codes") :].split("\n## ")[0]
    codes = {value for name, value in vars(exit_codes).items() if name.isupper() and isinstance(value, int)}
    assert {int(code) for code in re.findall(r"^\| (\d+) \|", table, re.MULTILINE)} == codes
    words = set(
        re.findall(r"\b(?:[A-Z]+-(?:BOUND|STATIONARY|COMPARABLE)|VALID|INVALID|FAILED|DISTURBED)\b", text)
    )
    assert words <= {str(state) for state in State}


def test_the_page_counts_the_bugs_that_are_put_back():
    (n,) = re.findall(r"(\d+) bugs reintroduced on purpose", METHOD.read_text())
    assert int(n) == len(MUTATIONS)
