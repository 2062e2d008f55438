"""A run's hardware: its model's config and its device, determined once and kept in the run's folder.

The device is the one that was named, else what the driver calls it, else this machine's CPU, where
`burstline calibrate` has measured it for the model.
"""

import math
import shlex
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from burstline.dtypes import FLOATS
from burstline.errors import RooflineError, parse_toml
from burstline.loadgen.capture.files import write_bytes
from burstline.machine import host_facts
from burstline.machine.catalogue import config_at, device_text, kept, kept_paths
from burstline.machine.hints import DEVICE_FILE, Hints, Stated
from burstline.measure.record.manifest import HardwareFacts, Manifest, ServerFacts
from burstline.measure.record.run_writer import RunDir
from burstline.roofline.device.device import load_device
from burstline.roofline.model.checkpoint import held_by, quant_of
from burstline.roofline.model.families import read_config
from burstline.roofline.model.shapes import ELEMENT_BYTES, QUANTS, Parallel
from burstline.roofline.predict.capacity import kv_bytes
from burstline.servers.host.kernel import usable_cores
from burstline.servers.identity import Identity
from burstline.servers.registry import ENGINES
from burstline.workloads.request import WorkloadError


class _UncalibratedError(RooflineError):
    """The engine computes on `n_cores` of this CPU, never measured for its model; `step` measures it."""

    def __init__(self, step: str, config: Mapping[str, Any], model: str, n_cores: int) -> None:
        super().__init__(f"this CPU is not calibrated for this model: run {step}")
        self.step, self.config, self.model, self.n_cores = step, config, model, n_cores


def check_hints(hints: Hints) -> None:
    """Raise RooflineError before anything is started where a device, a model or a stated fact cannot be."""
    stated = hints.stated
    for flag, n, least in (
        *((f"--{name}", getattr(stated, name), 1) for name in ("tp", "pp", "dp", "ep")),
        ("--token-budget", stated.token_budget, 1),
        ("--draft-tokens", stated.draft_tokens, 0),
    ):
        if n is not None and n < least:
            raise RooflineError(f"{flag} {n}: expected a whole number of at least {least}")
    if stated.quant is not None and stated.quant not in QUANTS:
        raise RooflineError(f"--quant {stated.quant}: expected one of {', '.join(QUANTS)}")
    if stated.kv_dtype is not None and stated.kv_dtype not in ELEMENT_BYTES:
        raise RooflineError(f"--kv-dtype {stated.kv_dtype}: expected one of {', '.join(ELEMENT_BYTES)}")
    if stated.expert_share is not None and not 0 < stated.expert_share <= 1:
        raise RooflineError(f"--expert-share {stated.expert_share:g}: expected a share above 0 and up to 1")
    if hints.device not in (None, "cpu"):
        load_device(str(hints.device))
    if hints.model_config is not None:
        config_at(hints.model_config)


def note_hardware(
    run: RunDir, hints: Hints, *, force: bool = True, needed: bool = False, unmeasured: str = ""
) -> _UncalibratedError | None:
    """Note the manifest's `hardware`, and write `device.toml` where the device is known.

    Returns that this CPU would have to be measured; `unmeasured` says why that failed.

    WorkloadError where another device than the run's own would replace it, unless `force`, and where a
    `needed` device or its model is not known.
    `absent` says why model or device is not known; `stated` is what a person states of the engine.
    """
    manifest, lacking = run.manifest, None
    earlier = manifest.hardware.stated if manifest.hardware else None
    facts = HardwareFacts(stated={**(earlier or {}), **hints.stated.to_json()} or None)
    try:
        config, model_from = _model(manifest, hints)
        facts = replace(facts, model_config=config, model_from=model_from, held=_held(config, model_from))
        known_by = manifest.hardware.device_from if manifest.hardware else None
        if hints.device is None and known_by and (run.path / DEVICE_FILE).exists():
            facts = replace(facts, device_from=known_by)  # only the model was named anew
            data = (run.path / DEVICE_FILE).read_bytes()
        else:
            if not force:
                _refuse_another(run, hints)
            stated, named = Stated.from_json(facts.stated or {}), model_from.partition("--model-config ")[2]
            known = replace(hints, stated=stated, model_config=named or None)
            text, device_from = _device(manifest, config, known, run)
            data = text.encode()
            write_bytes(run.path / DEVICE_FILE, data)
            facts = replace(facts, device_from=device_from)
        usd = parse_toml(data, run.path / DEVICE_FILE).get("usd_per_hour")
        # Without the file's price for what was known before, somebody has stated another.
        if usd and (hints.device is not None or manifest.usd_per_hour == usd * _n_devices(manifest, earlier)):
            manifest = replace(manifest, usd_per_hour=usd * _n_devices(manifest, facts.stated))
    except RooflineError as why:
        if needed:
            raise WorkloadError(f"--device {hints.device}: {why}") from None
        lacking = why if isinstance(why, _UncalibratedError) else None
        absent = str(why)
        if lacking and unmeasured:
            once = f"Once that has changed, run {lacking.step}"
            absent = f"this CPU could not be calibrated ({unmeasured}). {once}"
        facts = replace(facts, absent=absent)
    run.note(replace(manifest, hardware=facts))
    return lacking


def _n_devices(manifest: Manifest, stated: Mapping[str, Any] | None) -> int:
    """How many are paid for: those of the engine as it is stated, or as it says, and all that are here."""
    told, own = Stated.from_json(stated or {}), manifest.identity or Identity(manifest.engine)
    ranks = (own.tensor_parallel_size, own.pipeline_parallel_size, own.data_parallel_size)
    if told.ranks:
        ranks = (told.tp, told.pp, told.dp)
    return max(1, len(manifest.devices), math.prod(n or 1 for n in ranks))


def _refuse_another(run: RunDir, hints: Hints) -> None:
    """A CPU's measurement is of one machine: made elsewhere, it would say nothing of this run."""
    path, manifest = run.path / DEVICE_FILE, run.manifest
    if hints.device is None or not path.exists():
        return
    own = parse_toml(path.read_bytes(), path).get("id")
    if hints.device == "cpu":
        here = host_facts.host().cpu
        if manifest.host.cpu in (None, here):
            return
        other = f"this machine's {here}"
    else:
        other = load_device(str(hints.device)).id
        if other == own:
            return
    raise WorkloadError(
        f"--device {hints.device}: the run was made on {own}, and {DEVICE_FILE} in its folder would become "
        f"{other}; add --force to replace it"
    )


def _model(manifest: Manifest, hints: Hints) -> tuple[Mapping[str, Any], str]:
    earlier, server = manifest.hardware, manifest.server or ServerFacts()
    identity = manifest.identity or Identity(manifest.engine)
    if hints.model_config is not None:
        return config_at(hints.model_config), f"--model-config {hints.model_config}"
    if earlier is not None and earlier.model_config is not None:
        return earlier.model_config, earlier.model_from or "an earlier report"
    engine = ENGINES.get(manifest.engine)
    if (own := engine.model_config(identity) if engine else None) is not None:
        return own, "the engine"
    tokenizer = manifest.asked.tokenizer and str(manifest.asked.tokenizer)
    names = [name for name in (server.model_asked, identity.model, server.model, tokenizer) if name]
    for name in names:
        try:
            return config_at(name), name
        except RooflineError:
            continue
    said = f"no config.json of {names[0]!r}" if names else "no model's name"
    raise RooflineError(f"{said} is available: name its folder or a bundled model with --model-config")


def _held(config: Mapping[str, Any], model_from: str) -> float | None:
    """`HardwareFacts.held` of a folder with weights."""
    folder = Path(model_from.removeprefix("--model-config ")).expanduser()
    try:
        model = read_config(config)
        held = held_by(folder, model, quant_of(config, model)).held
    except RooflineError:  # of an unknown family, say, which the roofline says
        return None
    return None if held == 1 else held


def _device(manifest: Manifest, config: Mapping[str, Any], hints: Hints, run: RunDir) -> tuple[str, str]:
    if hints.device not in (None, "cpu"):
        return device_text(str(hints.device)), f"--device {hints.device}"
    server, identity = manifest.server or ServerFacts(), manifest.identity or Identity(manifest.engine)
    stated = hints.stated.quant
    quant = QUANTS[stated] if stated else quant_of(config)
    dtype = dtype_of(identity) or _of_cache(identity, config) or (quant.activations if stated else None)
    n_cores = cores_of(manifest, dtype, quant.activations, named=hints.device == "cpu")
    if n_cores is not None:
        if (known := kept(n_cores, config, manifest.engine)) is None:
            model = hints.model_config or server.model_asked or identity.model or server.model or "reference"
            raise _UncalibratedError(
                f"`burstline calibrate --device cpu --quick --model {shlex.quote(model)} "
                f"--threads {n_cores}` (20 s, once), then `burstline report {shlex.quote(str(run.path))} "
                f"--device cpu{f' --quant {stated}' if stated else ''}`",
                config, model, n_cores,
            )  # fmt: skip
        return known, "having been measured for this model"
    if not manifest.on_this_machine:
        raise RooflineError(f"the device behind {server.url} is not known: name it with --device")
    names = list(dict.fromkeys(device.name for device in manifest.devices))
    if len(names) != 1 or manifest.devices[0].is_slice:
        seen = f"it serves on {' and '.join(names)}" if names else manifest.devices_from or "no GPU was seen"
        part = ", a slice" if names and manifest.devices[0].is_slice else ""
        named = f"`burstline report {shlex.quote(str(run.path))} --device cpu --quant fp32`"
        cpu = {"fp32": " (an id, or cpu)", None: f"; if it is a CPU and the server computes in fp32: {named}"}
        how = "" if names else cpu.get(dtype, "")
        raise RooflineError(f"the device is not known ({seen}{part}): name it with --device{how}")
    return device_text(names[0]), f"its driver calls it {names[0]}"


def dtype_of(identity: Identity) -> str | None:
    """What the engine says that it computes in: a float's short name, or its quantization."""
    quantized = identity.quantization if identity.quantization != "none" else None
    return FLOATS.get(str(identity.dtype), quantized)


def _of_cache(identity: Identity, config: Mapping[str, Any]) -> str | None:
    """By the bytes of a token in the KV cache, which has the engine's data type unless it states another."""
    if identity.kv_cache_dtype is None and identity.kv_tok and identity.kv_bytes:
        with suppress(RooflineError):
            parallel = Parallel(tp=identity.tensor_parallel_size or 1)
            of_fp32 = kv_bytes(read_config(config), QUANTS["fp32"], parallel, 1)
            share = identity.kv_bytes / identity.kv_tok / of_fp32
            return {0.5: "16-bit", 1.0: "fp32"}.get(round(20 * share) / 20)  # bf16 and fp16 take the same
    return None


def cores_of(manifest: Manifest, dtype: str | None, stored: str, *, named: bool = False) -> int | None:
    """On how many of this machine's cores the engine computed; None where it did not, or nothing says so.

    A server that was started here on a machine without a GPU computes on the CPU. So does an attached one
    where the user has `named` the CPU, on one core as far as is known. Raises RooflineError for any `dtype`
    but fp32, which alone is measured. Where it is not known, a checkpoint `stored` in fp32 is taken for it.
    """
    server, engine = manifest.server, ENGINES.get(manifest.engine)
    identity = manifest.identity or Identity(manifest.engine)
    started = server is not None and not server.attached
    n_cores = engine.cores_of(identity) if engine is not None and started else None
    if n_cores is not None:
        return n_cores
    if not named and not (started and not manifest.devices):
        return None
    if dtype is None and stored != "fp32":
        why = "the server's data type is not known, and on a CPU only fp32 is measured"
        raise RooflineError(f"{why}: if so, pass --quant fp32 to `burstline report`, else --device FILE")
    if dtype not in (None, "fp32"):
        way = _fp32_way(manifest.engine, started=started)
        raise RooflineError(f"{dtype} products on a CPU are not measured: {way}pass --device FILE")
    return 1 if server is None or not started else server.n_cores or usable_cores()


def _fp32_way(engine: str, *, started: bool) -> str:
    """How this engine serves in fp32: by its flag, or by what its weights are stored in; "" if by neither."""
    spelling = ENGINES[engine].settings.get("dtype") if engine in ENGINES else None
    words = spelling.arguments("float32") if spelling else None
    if not words:
        own = "serve weights that are fp32 (`burstline make-model` writes such with --dtype float32), or "
        return "" if words is None else own
    return f"serve in fp32 ({'--dtype float32' if started else ' '.join(words)}), or "


def throw_away(run: RunDir) -> bool:
    """The calibration that the run exceeded, where it is still the one that is kept; whether it was."""
    if (hardware := run.manifest.hardware) is None:
        return False
    data = (run.path / DEVICE_FILE).read_bytes()
    n_cores = parse_toml(data, run.path / DEVICE_FILE).get("n_units") or 1
    paths = kept_paths(n_cores, hardware.model_config or {}, run.manifest.engine)
    exceeded = [path for path in paths if path.exists() and path.read_bytes() == data]
    for path in exceeded:
        path.unlink()
    return bool(exceeded)
