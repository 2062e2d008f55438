"""`burstline calibrate`: measure this machine for the roofline and keep the result."""

import argparse
import tempfile
from dataclasses import replace
from pathlib import Path

import orjson

from burstline import exit_codes, host_overhead
from burstline.loadgen.record.files import write_bytes
from burstline.machine.cpu_calibration import path_of, torch_version
from burstline.machine.hardware import config_at
from burstline.machine.host_facts import MOST_OTHERS, CpuTime
from burstline.roofline.calibrate import calibrate
from burstline.roofline.device.calibration import cached_file, device_toml, load_calibration
from burstline.roofline.device.device import load_device
from burstline.roofline.errors import RooflineError
from burstline.servers.identity import CpuSetup


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", default="cpu", help="cpu (numpy), or torch's name of a GPU, e.g. cuda:0")
    parser.add_argument(
        "--model",
        default="reference",
        help="whose products to measure: a bundled name, a folder, a config.json",
    )
    parser.add_argument("--threads", type=int, default=1, help="cores to compute on, as the engine will (1)")
    parser.add_argument(
        "--python",
        metavar="PATH",
        help="an engine's interpreter: measure its torch on the CPU, in --dtype, instead of numpy in fp32",
    )
    parser.add_argument("--dtype", choices=("bf16", "fp16", "fp32"), help="with --python; default bf16")
    parser.add_argument("--quick", action="store_true", help="20 seconds instead of 2 minutes")
    parser.add_argument("--out", type=Path, help="the file to write (default: in the user's cache)")


def run(args: argparse.Namespace) -> int:
    """Always 0: what could not be measured raises."""
    _check(args)
    config = config_at(args.model)
    on_cpu, dtype = args.device == "cpu", args.dtype or "bf16"
    cpu = CpuSetup(args.threads, args.python, dtype if args.python else "fp32")
    kept = path_of(cpu, config, quick=args.quick) if on_cpu else None
    out = args.out or kept or cached_file(args.model, args.device, args.threads, quick=args.quick)
    how = f" in {dtype} by the torch of {args.python}" if args.python else ""
    print(
        f"Measuring {args.device}, {args.threads} core(s), the products of {args.model}{how} ...", flush=True
    )
    before = CpuTime.now()
    with tempfile.TemporaryDirectory(prefix="burstline-") as name:
        config_file, measured = Path(name, "config.json"), Path(name, "device.toml")
        config_file.write_bytes(orjson.dumps(config))
        calibrate.calibrate_pinned(
            config_file,
            measured,
            device=args.device,
            threads=args.threads,
            quick=args.quick,
            torch_python=args.python,
            dtype=dtype,
        )
        if on_cpu and not args.python and host_overhead.add_host(measured, config, args.threads) is None:
            print("The embedded engine's host was not measured: predictions leave its time out")
        others = before.others_until(CpuTime.now())
        text = measured.read_text("utf-8")
        if on_cpu and others > MOST_OTHERS:
            text = _doubted(str(measured), others)
            print(f"Other processes used {others:.0%} of this machine meanwhile: repeat it when it is quiet")
    out.parent.mkdir(parents=True, exist_ok=True)
    write_bytes(out, text.encode())
    _show(out)
    print(f"Written to {out}; {_used_by(out, kept)}")
    return exit_codes.DONE


def _used_by(out: Path, kept: Path | None) -> str:
    if out == kept:
        return "runs of this model on this CPU use it, and so does `burstline bound --device FILE`."
    return f"`burstline bound --device {out}` uses it."


def _doubted(path: str, others: float) -> str:
    """The file's device and calibration, said to be uncertain by the share that others used."""
    device, calibration = load_device(path), load_calibration(path)
    return device_toml(
        replace(device, assurance=f"{device.assurance}, while others used {others:.0%} of the machine"),
        replace(calibration, measured_spread=(calibration.measured_spread or 0.0) + others),
    )


def _check(args: argparse.Namespace) -> None:
    """Raise RooflineError for flags that cannot be met."""
    if args.threads < 1:
        raise RooflineError(f"--threads {args.threads}: expected at least 1")
    if args.python is None:
        if args.dtype is not None:
            raise RooflineError(f"--dtype {args.dtype} needs --python PATH: numpy measures in fp32")
        return
    if args.device != "cpu":
        raise RooflineError(f"--python measures the CPU: leave out --device {args.device}")
    if torch_version(args.python) is None:
        raise RooflineError(f"--python {args.python}: expected an interpreter that has torch")


def _show(out: Path) -> None:
    device, calibration = load_device(str(out)), load_calibration(str(out))
    print(device.name)
    for dtype, peak in device.peaks.items():
        print(f"  {dtype:<12}{peak / 1e9:10.1f} GFLOP/s")
    for level in device.levels:
        rate, size = (level.bytes_per_s or 0) / 1e9, level.capacity_bytes / 2**20
        print(f"  {level.name:<12}{rate:10.1f} GB/s up to {size:,.1f} MiB")
    for kind, spread in calibration.spread.items():
        print(
            f"  {kind:<12}measured is {spread.low:.2f} to {spread.high:.2f} of predicted ({spread.n} points)"
        )
    if host := calibration.host:
        print(f"  {'host':<12}{host} (of the embedded engine)")
    print(f"  repeats of one measurement differ by {calibration.measured_spread or 0:.1%}")
