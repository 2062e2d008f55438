"""The steps of CI. All of them run, whatever fails; the last lines are a table.

What is expensive to make (engines, the containers' base, uv and the wheels that it fetches) is kept outside
the clone, in ${XDG_CACHE_HOME:-~/.cache}/burstline, each in a folder named after the hash of what makes it.
CI_ENGINES names another folder for the engines and the base.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).parents[1]
LOGS = ROOT / ".ci/logs"
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "burstline"
KEPT_DAYS = 30
"""A folder of the cache that no run used for so long goes when its successor is made."""


@dataclass
class Row:
    """A line of the table: how one step ended."""

    name: str
    seconds: float = 0.0
    passed: int = 0
    failed: int = 0
    undecided: int = 0
    skipped: int = 0
    notes: list[str] = field(default_factory=list)

    def fail(self, why: str) -> None:
        self.failed += 1
        self.notes.append(why)


@dataclass(frozen=True)
class Kept:
    """Something expensive: the command that makes it, its folder last; from which files; how large it is."""

    name: str
    argv: tuple[str, ...]
    sources: tuple[str, ...]
    gigabytes: float

    def folder(self, parent: Path) -> Path:
        made_of = [*map(str.encode, self.argv), *((ROOT / each).read_bytes() for each in self.sources)]
        digest = hashlib.sha256(b"\0".join([*made_of, sys.version.encode()])).hexdigest()
        return parent / f"{self.name}-{digest[:12]}"


def engine(name: str, script: str, gigabytes: float) -> Kept:
    return Kept(name, ("nice", "sh", script), (script, "scripts/virtualenv.sh"), gigabytes)


UV = Kept("uv", ("sh", "-c", f'{sys.executable} -m venv "$0" && "$0/bin/pip" install -q uv==0.13.9'), (), 0.2)
ENGINES = (
    engine("vllm", "scripts/install-vllm-cpu.sh", 6),
    engine("llama", "scripts/build-llama-server.sh", 1),
    engine("sglang", "scripts/install-sglang-cpu.sh", 11),
)
BASE_SCRIPT = "scripts/container-base.sh"
BASE = Kept("container-base", ("nice", "sh", BASE_SCRIPT), (BASE_SCRIPT,), 1)


def make(wanted: Kept, parent: Path) -> tuple[Path, str]:
    """Its folder, made if it is not there, and what its command printed; else RuntimeError, in one line."""
    folder, log = wanted.folder(parent), LOGS / f"{wanted.name}.log"
    complete = folder / ".complete"
    try:
        parent.mkdir(parents=True, exist_ok=True)
        with Path(f"{folder}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # another clone may be making it
            if not complete.exists():
                shutil.rmtree(folder, ignore_errors=True)  # half-made
                if (free := shutil.disk_usage(parent).free) < wanted.gigabytes * 1e9:
                    raise RuntimeError(
                        f"{wanted.name} needs {wanted.gigabytes} GB in {parent} and {free / 1e9:.1f} GB are "
                        "free: make room, or name another folder in XDG_CACHE_HOME or CI_ENGINES"
                    )
                with log.open("w") as err:
                    argv = [*wanted.argv, str(folder)]
                    done = subprocess.run(argv, cwd=ROOT, stdout=subprocess.PIPE, stderr=err, text=True)
                if done.returncode:
                    last = (log.read_text("utf-8", "replace").strip() or "no message").splitlines()[-1]
                    raise RuntimeError(f"{wanted.name} was not made; the next run tries again: {last[:300]}")
                complete.write_text(done.stdout)
            complete.touch()
            forget(wanted.name, folder)
            return folder, complete.read_text()
    except OSError as error:
        raise RuntimeError(f"{wanted.name} was not made; the next run tries again: {error}") from error


def forget(name: str, current: Path) -> None:
    """Remove what older scripts made under this name, unless another clone used it lately."""
    now_s = (current / ".complete").stat().st_mtime
    for other in set(current.parent.glob(f"{name}-*/")) - {current}:
        used = other / ".complete" if (other / ".complete").exists() else other
        if now_s - used.stat().st_mtime > KEPT_DAYS * 86400:
            shutil.rmtree(other, ignore_errors=True)


@contextmanager
def timed(row: Row) -> Iterator[Row]:
    began_s = time.monotonic()
    print(f"\n==== {row.name}", flush=True)
    try:
        yield row
    except RuntimeError as error:
        row.fail(str(error))
        print(error, flush=True)
    finally:
        row.seconds = time.monotonic() - began_s


def step(
    name: str, command: str, env: Mapping[str, str], *, tests: bool = False, beside: bool = False
) -> Row:
    """Run a shell command. Its output comes as it is made, or at the end if other steps run beside it."""
    report = LOGS / f"{name}.xml"
    if tests:
        env = {**env, "PYTEST_ADDOPTS": f"--junitxml={report}"}
    output = subprocess.PIPE if beside else None
    with timed(Row(name)) as row:
        done = subprocess.run(
            ["bash", "-c", command],
            cwd=ROOT,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT if beside else None,
            text=True,
        )
        if done.stdout:
            print(f"---- {name}\n{done.stdout}", flush=True)
        if tests:
            count(row, report)
        elif done.returncode == 0:
            row.passed += 1
        if done.returncode and not row.failed:
            row.fail(f"exit code {done.returncode}")
    return row


def count(row: Row, report: Path) -> None:
    """Add to a row how many tests passed, failed, were undecided and skipped, and why."""
    if not report.exists():
        row.fail("no test ran")
        return
    # A test that was repeated stands there more than once; its last attempt counts.
    found = ElementTree.parse(report).iter("testcase")
    cases = {f"{case.get('classname')}::{case.get('name')}": case for case in found}
    reasons: Counter[str] = Counter()
    for name, case in cases.items():
        skipped = case.find("skipped")
        if case.find("failure") is not None or case.find("error") is not None:
            row.fail(f"failed: {name}")
        elif skipped is None:
            row.passed += 1
        elif (reason := skipped.get("message") or "").startswith("undecided"):
            row.undecided += 1
            reasons[f"{name}: {reason}"] += 1
        else:
            row.skipped += 1
            reasons[f"skipped: {reason}"] += 1
    row.notes += [f"{n} x {reason[:200]}" for reason, n in sorted(reasons.items())]


def no_containers() -> str:
    """Why this machine can run no container daemon: no root, or no namespaces; "" where it can."""
    probe = "unshare --mount --net --pid --ipc --uts --fork mount -t tmpfs x /mnt"
    done = subprocess.run(["sh", "-c", probe], capture_output=True, text=True)
    return f"no container can run on this machine: {done.stderr.strip()[:200]}" if done.returncode else ""


def main() -> int:
    began_s = time.monotonic()
    shutil.rmtree(LOGS, ignore_errors=True)
    LOGS.mkdir(parents=True)
    env = {**os.environ, "CI": "true", "HF_HUB_OFFLINE": "1"}
    env.pop("PYTHONDONTWRITEBYTECODE", None)  # without caches each of the many processes compiles all modules
    rows: list[Row] = []

    def beside(commands: Mapping[str, str]) -> None:
        with ThreadPoolExecutor(len(commands)) as pool:
            steps = [pool.submit(step, *each, env, beside=True) for each in commands.items()]
            rows.extend(each.result() for each in steps)

    # As README has it: by pip, if there is no uv. Later environments take their wheels from the cache.
    shutil.rmtree(ROOT / ".venv", ignore_errors=True)
    rows.append(step("environment", "make .venv/.dev", env))
    beside({name: f"make {name}" for name in ("lint", "types", "contract")})

    with timed(Row("uv")) as row:
        folder, _ = make(UV, CACHE)
        env["PATH"] = f"{folder}/bin:{env['PATH']}"
        env |= {"UV_CACHE_DIR": f"{CACHE}/wheels", "UV_LINK_MODE": "hardlink"}
        row.passed += 1
    rows.append(row)
    with ThreadPoolExecutor(2) as background:  # two download, or one downloads and one compiles
        folder = Path(os.environ.get("CI_ENGINES") or CACHE)
        wanted = ENGINES if (why := no_containers()) else (*ENGINES, BASE)
        made = {each.name: background.submit(make, each, folder) for each in wanted}
        rows.append(step("unit", "make test", env, tests=True))
        checks = {name: f"scripts/check-{name}.sh .venv/bin/python" for name in ("wheel", "lowest")}
        beside({**checks, "run": "make run"})
        rows.append(step("packages", "make .venv/.slow", env))
        for name, future in made.items():
            with timed(Row(name)) as row:
                _, printed = future.result()
                # "export NAME=VALUE": what a user pastes into a shell.
                env |= dict(re.findall(r"^export (\w+)=(.*)$", printed, re.MULTILINE))
                row.passed += 1
            rows.append(row)

    env["BURSTLINE_TRANSFORMERS_PYTHON"] = str(ROOT / ".venv/bin/python")
    rows.append(step("slow", "make slow", env, tests=True))
    rows.append(step("timing", "make timing", env, tests=True))
    rows.append(step("browser", "make browser", env, tests=True))
    if not why:
        rows.append(step("containers", "make containers", env, tests=True))
    for row in rows[-1 if why else -2 :]:
        if row.skipped:
            row.fail("no test of this step may be skipped")
    if why:
        rows.append(Row("containers", skipped=1, notes=[why]))
    rows.append(step("promises", f"make promises FROM={LOGS}", env))

    print(f"\n{'step':<14}{'seconds':>9}{'passed':>9}{'failed':>9}{'undecided':>11}{'skipped':>9}")
    for row in rows:
        numbers = f"{row.passed:>9}{row.failed:>9}{row.undecided:>11}{row.skipped:>9}"
        print(f"{row.name:<14}{row.seconds:>9.0f}{numbers}", *row.notes, sep="\n    ")
    passed, failed = sum(row.passed for row in rows), sum(row.failed for row in rows)
    print(f"{'in all':<14}{time.monotonic() - began_s:>9.0f}{passed:>9}{failed:>9}\n")
    print(f"{passed} passed, {failed} failed, {sum(row.skipped + row.undecided for row in rows)} skipped")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
