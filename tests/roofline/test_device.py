"""Devices: the table is sound, names are found, files are read, mistakes are named."""

import csv
from pathlib import Path

import pytest

from burstline.errors import RooflineError
from burstline.machine.catalogue import device_text
from burstline.roofline.device.device import bundled_devices, load_device, read_device
from burstline.roofline.model.shapes import ELEMENT_BYTES

FILE = """
name = "a laptop"
vendor = "cpu"
peak_flops_per_s = { fp32 = 2e11 }
source = "measured"

[[levels]]
name = "L2"
capacity_bytes = 2097152
bytes_per_s = 4e11

[[levels]]
name = "DRAM"
capacity_bytes = 16e9
bytes_per_s = 2e10
"""


@pytest.mark.parametrize("device", bundled_devices(), ids=lambda device: device.id)
def test_every_bundled_device_is_sound(device):
    assert device.source
    assert device.assurance
    assert set(device.peaks) <= set(ELEMENT_BYTES)
    assert all(peak > 1e12 for peak in device.peaks.values())
    assert 10 < device.ridge("bf16" if "bf16" in device.peaks else "fp16") < 700
    capacities = [level.capacity_bytes for level in device.levels]
    assert capacities == sorted(capacities)
    assert [link.n_devices for link in device.links] == sorted(link.n_devices for link in device.links)


def test_the_platforms_of_papers_and_clouds_are_there_and_no_name_is_used_twice():
    devices = bundled_devices()
    assert {"a800-sxm4-80g", "rtx3090", "rtx4090", "rtx-pro-6000", "gb300", "h200-sxm-141g"} <= {
        device.id for device in devices
    }
    names = [name.lower() for device in devices for name in {device.id, *device.aliases}]
    assert len(names) == len(set(names))


def test_peaks_and_bandwidths_are_dense_ones_as_printed_in_the_datasheets():
    h100 = load_device("h100")
    assert (h100.peak_flops_per_s("bf16"), h100.bytes_per_s, h100.links[0].bytes_per_s) == (
        989.4e12,
        3350e9,
        450e9,
    )
    assert load_device("rtx4090").peak_flops_per_s("bf16") == 165.2e12  # FP32 accumulate, not 330
    assert load_device("b300-sxm").peak_flops_per_s("int8") == 153.5e12  # cut thirtyfold against B200
    assert h100.cache_bytes == 50 * 2**20


@pytest.mark.parametrize(
    ("name", "id_"),
    [
        ("a100-sxm4-80g", "a100-sxm4-80g"),
        ("A100-SXM4-80G", "a100-sxm4-80g"),
        ("NVIDIA A100-SXM4-80GB", "a100-sxm4-80g"),
        ("NVIDIA H100 80GB HBM3", "h100-sxm5-80g"),
        ("NVIDIA GeForce RTX 4090", "rtx4090"),
        ("NVIDIA H200", "h200-sxm-141g"),
        ("AMD Instinct MI300X", "mi300x"),
        ("MI250X-GCD (Frontier)", "mi250x-gcd-frontier"),
    ],
)
def test_a_device_is_found_by_id_alias_and_the_drivers_name(name, id_):
    assert load_device(name).id == id_


def test_every_device_of_the_worked_example_is_known_by_its_name_there():
    path = Path(__file__).parents[1] / "golden" / "roofline" / "worked_example.csv"
    with path.open() as file:
        for name in {row["device"] for row in csv.DictReader(file)}:
            assert load_device(name)


def test_an_unknown_device_names_the_nearest():
    with pytest.raises(RooflineError, match=r"unknown device 'h101-sxm'.*did you mean .*h100-sxm5-80g"):
        load_device("h101-sxm")
    with pytest.raises(RooflineError, match="a100-sxm4-80g"):
        load_device("zzz")


def test_a_dtype_without_a_peak_is_refused_not_replaced():
    with pytest.raises(RooflineError, match="A100-SXM4-80G has no dense fp8 peak; it has bf16, fp16"):
        load_device("a100").peak_flops_per_s("fp8")


def test_a_users_file_describes_a_device_with_a_hierarchy(tmp_path):
    path = tmp_path / "laptop.toml"
    path.write_text(FILE)
    device = load_device(str(path))
    assert (device.id, device.name, device.bytes_per_s, device.cache_bytes) == (
        "laptop",
        "a laptop",
        2e10,
        2097152,
    )


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("fp32 = 2e11", "fp31 = 2e11", "unknown dtype 'fp31'"),
        ("peak_flops_per_s", "peaks", "peak_flops_per_s is missing"),
        ("levels", "tiers", "levels is missing"),
        ("bytes_per_s = 2e10", "", "its last level, DRAM, needs bytes_per_s"),
        ('name = "DRAM"', "", "a level or link is not as in"),
        ("[[levels]]", "[levels", "is not TOML"),
    ],
)
def test_a_users_file_with_a_mistake_is_refused(tmp_path, old, new, says):
    path = tmp_path / "laptop.toml"
    path.write_text(FILE.replace(old, new))
    with pytest.raises(RooflineError, match=says):
        load_device(str(path))


def test_a_users_file_of_other_bytes_is_refused(tmp_path):
    path = tmp_path / "laptop.toml"
    path.write_bytes(b"\xff\xfe\x00")
    for read in (load_device, device_text):
        with pytest.raises(RooflineError, match="is not TOML"):
            read(str(path))


def test_a_file_that_is_not_there_is_said_so():
    with pytest.raises(RooflineError, match=r"no device file at nowhere\.toml"):
        load_device("nowhere.toml")


def test_a_link_with_an_unknown_key_is_refused():
    table = {
        "peak_flops_per_s": {"bf16": 1e12},
        "levels": [{"name": "DRAM", "capacity_bytes": 1, "bytes_per_s": 1}],
    }
    with pytest.raises(RooflineError, match="a level or link"):
        read_device("x", table | {"links": [{"speed": 3}]})


def test_a_network_goes_outside_the_node_and_replaces_another():
    device = load_device("h100").with_network(50e9).with_network(25e9, 5e-6)
    assert [(link.scope, link.bytes_per_s) for link in device.links] == [("node", 450e9), ("network", 25e9)]
