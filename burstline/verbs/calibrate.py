"""`burstline calibrate`: measure this machine for the roofline and keep the result."""

import argparse
import json
from pathlib import Path

from burstline import exit_codes
from roofline.errors import RooflineError

_MODELS = Path(__file__).parents[2] / "roofline" / "model" / "configs"


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
    from burstline.machine.host_overhead import add_host
    from roofline.calibrate.calibrate import cached_file, calibrate_pinned

    _check(args)
    config = model_config(args.model)
    dtype = args.dtype or "bf16"
    kind = f"{args.device}-torch-{dtype}" if args.python else args.device
    out = args.out or cached_file(args.model, kind, args.threads, quick=args.quick)
    how = f" in {dtype} by the torch of {args.python}" if args.python else ""
    print(
        f"Measuring {args.device}, {args.threads} core(s), the products of {args.model}{how} ...", flush=True
    )
    calibrate_pinned(
        config,
        out,
        device=args.device,
        threads=args.threads,
        quick=args.quick,
        torch_python=args.python,
        dtype=dtype,
    )
    if args.device == "cpu" and not args.python:
        add_host(out, json.loads(config.read_text("utf-8")), args.threads)
    _show(out)
    print(f"Written to {out}; `burstline bound --device {out}` uses it.")
    return exit_codes.DONE


def _check(args: argparse.Namespace) -> None:
    """Raise RooflineError for flags that cannot be met."""
    from burstline.machine.cpu_calibration import torch_version

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


def model_config(model: str) -> Path:
    """The config.json of a bundled model, a folder or a file; raises where there is none."""
    for path in (_MODELS / f"{model}.json", Path(model) / "config.json", Path(model)):
        if path.is_file():
            return path
    known = ", ".join(sorted(path.stem for path in _MODELS.glob("*.json")))
    raise RooflineError(f"no model {model!r}: give a folder with config.json, or one of {known}")


def _show(out: Path) -> None:
    from roofline.device.calibration import load_calibration
    from roofline.device.device import load_device

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
