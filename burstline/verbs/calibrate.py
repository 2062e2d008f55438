"""`burstline calibrate`: measure this machine for the roofline and keep the result."""

import argparse
import shlex
import tempfile
from dataclasses import replace
from pathlib import Path

from burstline.bench.calibration import measured
from burstline.bench.host_overhead import host_of
from burstline.console import exit_codes
from burstline.errors import RooflineError
from burstline.loadgen.capture.files import write_bytes
from burstline.loadgen.wire.os_limits import ensure_sockets
from burstline.machine.catalogue import cache_folder, cached_file, config_at, path_of, read_kept
from burstline.machine.hints import DEVICE_FILE
from burstline.measure.record.rundir import Run, open_run
from burstline.roofline.device.calibration import device_toml, read_device_file, shared
from burstline.servers.host.kernel import usable_cores


def run(args: argparse.Namespace) -> int:
    """Always 0: what could not be measured raises."""
    if not 1 <= args.threads <= usable_cores():
        raise RooflineError(f"--threads {args.threads}: expected 1 to {usable_cores()}, the usable cores")
    if args.out is not None:
        _check_out(args.out)
    if args.from_run is not None:
        return _from_run(open_run(args.from_run), args.out)
    if args.list:
        lines = map(_line, sorted(cache_folder().glob("device-*.toml")))
        print("\n".join(lines) or f"No calibration is kept in {cache_folder()}")
        return exit_codes.DONE
    ensure_sockets(0)  # a machine that cannot send to itself cannot be measured
    config, on_cpu = config_at(args.model), args.device == "cpu"
    kept = path_of(args.threads, config, quick=args.quick) if on_cpu else None
    out = args.out or kept or cached_file(args.model, args.device, args.threads, quick=args.quick)
    print(f"Measuring {args.device}, {args.threads} core(s), the products of {args.model} ...", flush=True)
    text = measured(config, args.model, args.threads, args.device, quick=args.quick, most_s=None)
    out.parent.mkdir(parents=True, exist_ok=True)
    before = _line(out) if out.exists() else ""
    write_bytes(out, text.encode())
    _show(out)
    if before:
        print(f"Now:    {_line(out)}\nBefore: {before}")
    of_runs = "; runs of this model on this CPU use it" if out == kept else ""
    print(f"Written to {out}{of_runs}; `burstline bound --device {shlex.quote(str(out))}` uses it.")
    return exit_codes.DONE


def _line(path: Path) -> str:
    """Peak, bandwidth and conditions of a calibration, or what is wrong with its file."""
    try:
        device, calibration, made = read_kept(path)
    except RooflineError as why:
        return str(why)
    peak = ", ".join(f"{peak / 1e9:.1f} GFLOP/s in {dtype}" for dtype, peak in device.peaks.items())
    spread = f"repeats differ by {calibration.measured_spread or 0:.0%}, others used {made.others:.1%}"
    rates = f"{peak}, {device.bytes_per_s / 1e9:.1f} GB/s"
    return f"{made.date}, {made.model} on {device.name}: {rates}; {spread}; {made.versions}; {path}"


def _check_out(out: Path) -> None:
    """A place that cannot be written is refused before minutes of measuring."""
    if out.is_dir():
        raise RooflineError(f"--out {out} is a folder; expected a file, such as {out / 'device.toml'}")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=out.parent):
            pass
    except OSError as error:
        raise RooflineError(f"--out {out}: {error.strerror}; name a file in a folder of yours") from None


def _from_run(run: Run, out: Path | None) -> int:
    """Keep the run's device file with the host of its engine."""
    try:
        host = host_of(run)
    except RooflineError as why:
        raise RooflineError(f"{run.path}: {why}") from why
    if host is None:
        raise RooflineError(f"{run.path} shows too few steps that only decode; send a longer load")
    hardware, file = run.manifest.hardware, run.path / DEVICE_FILE
    assert hardware is not None
    assert hardware.model_config is not None
    device, calibration = read_device_file(file.read_bytes(), file)
    kept = path_of(device.n_units or 1, hardware.model_config, quick=True, engine=run.manifest.engine)
    out = out or kept
    out.parent.mkdir(parents=True, exist_ok=True)
    write_bytes(out, device_toml(device, replace(calibration, host=host)).encode())
    print(f"The host of {run.manifest.engine}: {host}. Written to {out}")
    return exit_codes.DONE


def _show(out: Path) -> None:
    device, calibration = read_device_file(out.read_bytes(), out)
    print(device.name)
    for dtype, peak in device.peaks.items():
        print(f"  {dtype:<12}{peak / 1e9:10.1f} GFLOP/s")
    for level in device.levels:
        rate, size = (level.bytes_per_s or 0) / 1e9, level.capacity_bytes / 2**20
        print(f"  {level.name:<12}{rate:10.1f} GB/s up to {size:,.1f} MiB")
    before = shared().constants
    for name in calibration.own:
        value, was = getattr(calibration.constants, name), getattr(before, name)
        print(f"  {name:<18}{value:10.4g}, shared by all devices {was:.4g}")
    for kind, spread in calibration.spread.items():
        print(f"  {kind:<12}measured is {spread.low:.2f} to {spread.high:.2f} of predicted")
    host = f"{calibration.host} (of the embedded engine)" if calibration.host else None
    print(f"  {'host':<12}{host or 'not measured: not predicted'}")
    print(f"  {_line(out)}")
