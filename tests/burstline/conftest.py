"""Runs that never happened, for tests of what is made of runs; and a tokenizer of a few words."""

from dataclasses import replace
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from burstline.loadgen.capture.files import write_json
from burstline.measure.record import tables
from burstline.measure.record.manifest import Manifest
from burstline.measure.record.run_writer import RunDir
from burstline.measure.record.rundir import Run, open_run
from burstline.measure.record.tables import telemetry_table
from burstline.measure.summarize import summarize_run
from burstline.workloads.lengths import Lengths
from burstline.workloads.plan import Shape, make_plan
from burstline.workloads.prompts import vocabulary_from_size
from burstline.workloads.spec import LoadSpec
from tests.reports import synthetic


@pytest.fixture(scope="session")
def burst_run(tmp_path_factory) -> Run:
    """A finished burst of 60 requests of 512 tokens, all answered."""
    records = synthetic.records(n=60, output_tok=8)
    manifest = Manifest(
        engine="vllm", workload="burst", title="60 x 512 -> 8 tokens, burst", asked=LoadSpec(salt="5eed")
    )
    run = RunDir.create(tmp_path_factory.mktemp("runs"), manifest)
    shape = Shape(Lengths(512, 512), Lengths(8, 8))
    run.save_plan(make_plan(shape, [0.0] * 60, vocabulary_from_size(32_000), seed=0))
    run.save("records.parquet", [tables.record_table(records)])
    run.save("telemetry.parquet", [telemetry_table(synthetic.telemetry(records))])
    run.save_manifest(replace(run.manifest, status="complete"))
    write_json(run.path / "summary.json", summarize_run(open_run(run.path)).to_json())
    return open_run(run.path)


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One token a word, as the known-truth server counts a text."""
    folder = tmp_path_factory.mktemp("tokenizer")
    made = Tokenizer(models.WordLevel({"?": 0} | {f"w{i}": i + 1 for i in range(200)}, unk_token="?"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made.save(str(folder / "tokenizer.json"))
    return folder
