"""Measures this machine for the roofline: memory by working set, a model's own products, attention, norms.

What comes out is a device file: the device's ceilings as measured and, in its [calibration] table, the fit,
how far it is off, and the measured shapes themselves. A process measures with the cores it has, so
`burstline/bench/calibration.py` starts one for each measurement.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from burstline.compute_threads import take_cores
from burstline.errors import RooflineError
from burstline.roofline.calibrate.measurements import Probe, calibrate
from burstline.roofline.calibrate.probe_numpy import NumpyProbe
from burstline.roofline.calibrate.probe_torch import TorchProbe
from burstline.roofline.device.calibration import device_toml
from burstline.roofline.model.families import read_config


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="burstline.roofline.calibrate.calibrate")
    parser.add_argument("config", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--quick", action="store_true")
    args = parser.parse_args(argv)
    model = read_config(json.loads(args.config.read_text("utf-8")), args.config.stem)
    probe = _probe(args.device, args.threads, model.vocab)
    device, calibration = calibrate(model, probe, quick=args.quick)
    partial = args.out.with_suffix(".partial")
    partial.write_text(device_toml(device, calibration), "utf-8")
    partial.rename(args.out)


def _probe(device: str, threads: int, vocab: int) -> Probe:
    if device == "cpu":
        take_cores(threads)
        return NumpyProbe(threads, vocab)
    try:
        return TorchProbe(device)
    except ImportError as error:
        raise RooflineError(f"measuring {device} needs torch, which is not installed: {error}") from error


if __name__ == "__main__":
    main()
