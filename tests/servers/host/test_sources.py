from pathlib import Path

import pytest

from burstline.servers.host import kernel, sources
from burstline.servers.host.sources import CpuPressure, HostCpu, MissingSourceError, Rapl, Throttling


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty /proc and /sys/fs/cgroup."""
    monkeypatch.setattr(sources, "PROC", tmp_path / "proc")
    monkeypatch.setattr(kernel, "CGROUPS", tmp_path / "cgroup")
    monkeypatch.setattr(kernel, "GROUPS_OF_SELF", tmp_path / "proc/self/cgroup")
    return tmp_path


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_pressure_counts_seconds_from_when_it_is_opened(machine: Path) -> None:
    write(machine / "proc/pressure/cpu", "some avg10=6.18 avg60=4.30 avg300=1.89 total=29000000\nfull ...\n")
    pressure = CpuPressure()
    write(machine / "proc/pressure/cpu", "some avg10=6.18 avg60=4.30 avg300=1.89 total=31500000\nfull ...\n")
    assert pressure.read() == {"cpu_waiting_s": 2.5}


def test_what_a_machine_does_not_have_is_missing_with_a_reason(
    machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(MissingSourceError, match="no pressure stall information"):
        CpuPressure()
    for groups in ("", "0::/\n"):
        write(machine / "proc/self/cgroup", groups)
        with pytest.raises(MissingSourceError, match="no CPU quota"):
            Throttling()


def test_others_use_what_is_neither_ours_nor_stolen_and_it_never_falls(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    busy_and_steal = [(100.0, 7.0), (110.0, 8.0), (110.0, 8.0)]
    ours = [20.0, 24.0, 25.0]
    monkeypatch.setattr(sources, "_busy_and_steal_s", lambda: busy_and_steal.pop(0))
    host = HostCpu(lambda: ours.pop(0))
    first, second = host.read(), host.read()
    assert (first["busy_s"], first["others_cpu_s"], first["steal_s"]) == (10, 6, 1)
    assert second["others_cpu_s"] == 6


def test_rapl_sums_packages_leaves_out_their_parts_and_survives_a_wrap(
    machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "POWERCAP", machine / "powercap")
    with pytest.raises(MissingSourceError, match="no RAPL"):
        Rapl()
    for k in range(2):
        write(machine / f"powercap/intel-rapl:{k}/energy_uj", "9000000\n")
        write(machine / f"powercap/intel-rapl:{k}/max_energy_range_uj", "10000000\n")
        write(machine / f"powercap/intel-rapl:{k}:0/energy_uj", "77\n")
    rapl = Rapl()
    write(machine / "powercap/intel-rapl:0/energy_uj", "9500000\n")
    write(machine / "powercap/intel-rapl:1/energy_uj", "1000000\n")
    assert rapl.read() == {"energy_j": 2.5}
