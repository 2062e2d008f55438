"""Quotas and limits of control groups: version 1 and 2 by recorded files, this machine's by a real group."""

import argparse
import contextlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from burstline.errors import RooflineError
from burstline.machine import host_facts
from burstline.servers.host import kernel
from burstline.servers.host.sources import MissingSourceError, Throttling
from burstline.verbs import calibrate
from burstline.verbs.arguments import add_arguments

V2_STAT = "usage_usec 9\nnr_periods 10\nnr_throttled {n}\nthrottled_usec {us}\n"
V1_STAT = "nr_periods 10\nnr_throttled {n}\nthrottled_time {us}000\n"

FILES = {
    # By docker run --cpus 0.2 --memory 1g, and without.
    (1, True): {
        "cpu": {"cpu.cfs_quota_us": "20000\n", "cpu.cfs_period_us": "100000\n"},
        "memory": {"memory.limit_in_bytes": "1073741824\n"},
    },
    (1, False): {
        "cpu": {"cpu.cfs_quota_us": "-1\n", "cpu.cfs_period_us": "100000\n"},
        "memory": {"memory.limit_in_bytes": "9223372036854771712\n"},
    },
    (2, True): {"cpu": {"cpu.max": "20000 100000\n"}, "memory": {"memory.max": "1073741824\n"}},
    (2, False): {"cpu": {"cpu.max": "max 100000\n"}, "memory": {"memory.max": "max\n"}},
}

# The version; /proc/self/cgroup; where the folders of cpu and memory are. In a container the group is mounted
# as the root (docker, version 1), or is the root of a namespace (version 2); else it is below, and a group
# above it may have the quota (Kubernetes, systemd).
GROUPS = {
    "1, docker": (1, "5:memory:/docker/x\n4:cpu,cpuacct:/docker/x\n", "cpu,cpuacct", "memory"),
    "1, cpu apart": (1, "5:memory:/docker/x\n2:cpuacct:/a\n1:cpu:/docker/x\n0::/\n", "cpu", "memory"),
    "1, pod": (1, "5:memory:/pod/x\n4:cpu,cpuacct:/pod/x\n", "cpu,cpuacct/pod", "memory/pod"),
    "2, docker": (2, "0::/\n", ".", "."),
    "2, systemd": (2, "0::/system.slice/x.service\n", "system.slice", "system.slice"),
}


@pytest.fixture
def recorded(tmp_path, monkeypatch) -> Callable[..., tuple[Path, str]]:
    """Makes recorded files this process's own: the cpu.stat that counts, and its form."""
    monkeypatch.setattr(kernel, "CGROUPS", tmp_path / "cgroup")
    monkeypatch.setattr(kernel, "GROUPS_OF_SELF", tmp_path / "self")

    def make(name: str, *, limited: bool = True) -> tuple[Path, str]:
        version, groups, *places = GROUPS[name]
        (tmp_path / "self").write_text(groups)
        for controller, place in zip(("cpu", "memory"), places, strict=True):
            folder = tmp_path / "cgroup" / place
            folder.mkdir(parents=True, exist_ok=True)
            for file, text in FILES[version, limited][controller].items():
                (folder / file).write_text(text)
        stat, form = tmp_path / "cgroup" / places[0] / "cpu.stat", V1_STAT if version == 1 else V2_STAT
        stat.write_text(form.format(n=3, us=1_000_000))
        return stat, form

    return make


@pytest.mark.parametrize("name", GROUPS)
def test_a_quota_and_a_limit_are_host_facts_and_its_stops_are_counted(recorded, name) -> None:
    stat, form = recorded(name)
    facts = host_facts.host()
    assert (facts.cpu_quota, facts.memory_limit_bytes) == (0.2, 1 << 30)
    throttling = Throttling()
    stat.write_text(form.format(n=5, us=1_500_000))
    assert throttling.read() == {"n_throttled": 2, "throttled_s": 0.5}


@pytest.mark.parametrize("name", GROUPS)
def test_without_a_quota_and_a_limit_none_is_said(recorded, name) -> None:
    recorded(name, limited=False)
    facts = host_facts.host()
    assert (facts.cpu_quota, facts.memory_limit_bytes) == (None, None)
    with pytest.raises(MissingSourceError, match="no CPU quota"):
        Throttling()


def test_calibrate_refuses_what_would_measure_the_quota(recorded) -> None:
    recorded("2, docker")
    parser = argparse.ArgumentParser()
    add_arguments("calibrate", parser)
    with pytest.raises(RooflineError, match=r"a CPU quota allows 0\.2 CPUs' time"):
        calibrate.run(parser.parse_args(["--quick"]))


BURN = """
import sys, time
from pathlib import Path
Path(sys.argv[1], "cgroup.procs").write_text("0")
from burstline.machine import host_facts
from burstline.servers.host.sources import MissingSourceError, Throttling
throttling, end_s, throttled_s = Throttling(), time.monotonic() + 60.0, 0.0
while throttled_s < 0.2 and time.monotonic() < end_s:  # among busy neighbours it may get less than its quota
    sum(range(1_000_000))
    throttled_s = throttling.read()["throttled_s"]
print(host_facts.host().cpu_quota, throttled_s)
"""


@pytest.fixture
def group() -> Iterator[Path]:
    """A control group of this machine's version that allows a fifth of a CPU."""
    for root in (kernel.CGROUPS / "cpu", kernel.CGROUPS / "cpu,cpuacct", kernel.CGROUPS):
        folder = root / f"burstline-test-{os.getpid()}"
        with contextlib.suppress(OSError):
            folder.mkdir()
            try:
                if (folder / "cpu.cfs_quota_us").exists():
                    (folder / "cpu.cfs_quota_us").write_text("20000")
                else:
                    (folder / "cpu.max").write_text("20000 100000")
                yield folder
            finally:
                folder.rmdir()
            return
    pytest.skip("this user may not make a control group")


def test_a_real_group_that_is_stopped_is_seen(group: Path) -> None:
    done = subprocess.run([sys.executable, "-c", BURN, str(group)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    quota, throttled_s = done.stdout.split()
    assert float(quota) == 0.2
    assert float(throttled_s) > 0.1
