"""How much of its hardware a run used: the summary's `roofline`, and what it says about the run."""

from __future__ import annotations

from dataclasses import replace

from burstline.loadgen.record.rundir import Run
from burstline.loadgen.record.summary import Instrument
from burstline.loadgen.record.verdict import Reason
from burstline.loadgen.stats.figure import Absent
from burstline.machine.hints import DEVICE_FILE
from burstline.machine.host_facts import MOST_OTHERS
from burstline.machine.roofline_input import LackingError, seen_in, setup_of
from burstline.roofline.errors import RooflineError
from burstline.roofline.reconcile.reconcile import reconcile
from burstline.roofline.reconcile.reconciliation import NotReconciled, Reconciliation


def reconciled(run: Run) -> Reconciliation | NotReconciled:
    """The summary's `roofline`, from the run's own files alone: the same files give the same answer."""
    hardware = run.manifest.hardware
    if hardware is None:
        return NotReconciled(
            "the run does not say what it ran on; `burstline report RUN --device NAME` adds it"
        )
    if hardware.absent or hardware.model_config is None or not (run.path / DEVICE_FILE).exists():
        return NotReconciled(hardware.absent or f"{DEVICE_FILE} is gone from the run's folder")
    try:
        setup, assumed = setup_of(run)
        found = reconcile(seen_in(run, assumed), setup)
    except (LackingError, RooflineError) as why:
        return NotReconciled(str(why))
    model = replace(found.model, config_from=hardware.model_from, device_from=hardware.device_from)
    return replace(found, model=model)


def beside_others(
    found: Reconciliation | NotReconciled, instrument: Instrument
) -> Reconciliation | NotReconciled:
    """The same, with a word on who else used the CPU it ran on: their share is no gap of the engine's."""
    others = instrument.others_cpu_fraction
    if isinstance(found, NotReconciled) or found.device.measured_spread is None:
        return found
    if isinstance(others, Absent) or others.point <= MOST_OTHERS:
        return found
    warning = f"Other processes used {others.point:.0%} of this machine meanwhile, which is part of the gap."
    return replace(found, sentence=f"{found.sentence} {warning}")


def suspect(found: Reconciliation | NotReconciled) -> tuple[Reason, ...]:
    """Reasons not to believe a run: rates above what the hardware can do under every possible set-up."""
    if isinstance(found, NotReconciled):
        return ()
    return tuple(
        Reason(
            "beats-the-ceiling",
            f"Impossible rate: {each.what} exceeds the ceiling of {found.device.name} by {each.excess:.0%}"
            f" (tolerance {each.tolerance:.0%}).",
            f"Look for the cause: {'; or '.join(each.causes)}.",
        )
        for each in found.suspicions
    )
