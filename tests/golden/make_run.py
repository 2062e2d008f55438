"""Makes the golden run of today's schema: `python tests/golden/make_run.py`, once when SCHEMA has changed.

A burst at the embedded engine, whole with steps and hardware, without what names the machine: old folders are
never made again, they are what old versions wrote. Run it on a quiet machine until it says VALID.
"""

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import orjson

sys.path.insert(0, str(Path(__file__).parents[2]))

from burstline.loadgen.record.manifest import SCHEMA
from burstline.loadgen.record.rundir import open_run
from burstline.reports.formats.text import text
from burstline.reports.model.comparison import alone, view_of
from burstline.reports.page.digest import digest
from tests.burstline.calibrated import calibrated

LOAD = ("--requests", "64", "--prompt-tokens", "24", "--output-tokens", "6", "--salt", "60d")
TARGETS = ("--slo", "ttft.p50<=60s", "--slo", "ttft.p50<=1ms", "--slo", "ttft<=60s")
DERIVED = ("report.html",)


def main() -> None:
    target = Path(__file__).parent / "runs" / str(SCHEMA)
    with tempfile.TemporaryDirectory() as folder:
        argv = [sys.executable, "-m", "burstline", "run", "-q", "--engine", "reference", "--out", folder]
        subprocess.run([*argv, *LOAD, *TARGETS], stdout=subprocess.DEVNULL)
        (made,) = Path(folder).iterdir()
        calibrated(open_run(made))
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(made, target, ignore=shutil.ignore_patterns(*DERIVED))
        scrub(target, {str(made): "run", folder: "runs", sys.executable: "python"})
    print(text(digest(alone(view_of(open_run(target))))))


def scrub(run: Path, names: dict[str, str]) -> None:
    """Takes out what is of this machine alone: its paths, its kernel, its load."""
    for path in [run / "server.log", *run.glob("*.json"), *run.glob("*.toml")]:
        text = path.read_text()
        for name, plain in names.items():
            text = text.replace(name, plain)
        path.write_text(text)
    manifest = orjson.loads((run / "manifest.json").read_bytes())
    manifest["host"] |= {"platform": "Linux", "load_average": [0.0, 0.0, 0.0]}
    (run / "manifest.json").write_bytes(orjson.dumps(manifest, option=orjson.OPT_INDENT_2))


if __name__ == "__main__":
    main()
