"""Files that unpack, nest or repeat to far more than they hold: one line each, in little memory."""

from __future__ import annotations

import gzip
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from tests.faults.lab import REPOSITORY, noted
from tests.seeds import SEED

MOST_RSS = 600 << 20
MOST_S = 60.0
"""Generous: 15 s on an idle machine."""
N_DRAWN = int(os.environ.get("LAB_BOMBS", "20"))

READ = """
import json, re, sys, time
from pathlib import Path
from burstline.workloads.model_files import local_tokenizer
from burstline.reports.model.foreign import foreign_results
from burstline.machine.catalogue import device_text
from burstline.roofline.device.device import load_device
from burstline.errors import RooflineError
from burstline.roofline.model.families import load_model
from burstline.suites.suite import load_suite
from burstline.workloads.arrivals import parse_times
from burstline.workloads.chat import template_of
from burstline.workloads.data_sets import read_data
from burstline.workloads.lengths import parse_lengths
from burstline.workloads.model_files import read_json
from burstline.workloads.request import WorkloadError
from burstline.workloads.rows import lines
from burstline.workloads.traces import read_trace

READERS = {
    "data": lambda path: read_data(str(path)),
    "trace": lambda path: read_trace(str(path)),
    "times": lambda path: parse_times(lines(path, "--arrival")),
    "config": read_json,
    "lengths": lambda path: parse_lengths(f"file:{path}", "--prompt-tokens"),
    "model": lambda path: load_model(str(path)),
    "tokenizer": lambda path: local_tokenizer(path.parent, None),
    "template": lambda path: template_of(path.parent),
    "device": lambda path: load_device(str(path)),
    "calibration": lambda path: device_text(str(path)),
    "result": foreign_results,
    "suite": load_suite,
}
for kind, path in json.loads(sys.argv[1]):
    began_s, said = time.monotonic(), "read"
    try:
        READERS[kind](Path(path))
    except (WorkloadError, RooflineError) as error:
        said = str(error)
    # Not ru_maxrss, which begins with what the process had that started this one.
    peak = int(re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024
    print(json.dumps([said[:20_000], time.monotonic() - began_s, peak]), flush=True)
"""

Write = Callable[[Path], object]


def sparse(begin: bytes = b"") -> Write:
    """3 GB of zeros after a beginning, which take no space on a disk."""

    def write(path: Path) -> None:
        path.write_bytes(begin)
        os.truncate(path, 3 << 30)

    return write


def text(content: bytes) -> Write:
    return lambda path: path.write_bytes(content)


def zst(part: bytes, n: int) -> Write:
    def write(path: Path) -> None:
        with path.open("wb") as file, zstandard.ZstdCompressor(1).stream_writer(file) as packed:
            for _ in range(n):
                packed.write(part)

    return write


def gz(part: bytes, n: int) -> Write:
    def write(path: Path) -> None:
        with gzip.open(path, "wb", 1) as file:
            for _ in range(n):
                file.write(part)

    return write


def table(path: Path) -> None:
    """A text of 1 MB in each of 4,000 rows, which is stored once."""
    column = pa.DictionaryArray.from_arrays(pa.array([0] * 4000, pa.int32()), ["x" * (1 << 20)])
    pq.write_table(pa.table({"prompt": column}), path, compression="zstd")


def plain_table(path: Path) -> None:
    pq.write_table(
        pa.table({"prompt": ["x" * (1 << 20)] * 64}), path, compression="zstd", use_dictionary=False
    )


ROWS = b'{"prompt": "a"}\n' * 65_536
LIST = b'{"prompt": "a"},' * 65_536
DEEP = b"[" * 200_000
BOMBS: dict[str, tuple[str, str, Write]] = {
    "zeros as JSON lines": ("data", "x.jsonl", sparse()),
    "zeros as a list": ("data", "x.json", sparse(b'[{"prompt": "a"},')),
    "zeros in a row of a list": ("data", "x.json", sparse(b'[{"prompt": "')),
    "zeros as text": ("data", "x.txt", sparse()),
    "zeros as CSV": ("data", "x.csv", sparse()),
    "zeros as Parquet": ("data", "x.parquet", sparse(b"PAR1")),
    "rows in zstd": ("data", "x.jsonl.zst", zst(ROWS, 1000)),
    "rows in gzip": ("data", "x.jsonl.gz", gz(ROWS, 100)),
    "a list in zstd": ("data", "x.json.zst", zst(LIST, 1000)),
    "one row in zstd": ("data", "x.json.zst", zst(b'[{"prompt":"' + bytes(1 << 20), 1000)),
    "a table of one long text": ("data", "x.parquet", table),
    "a table that packs to nothing": ("data", "x.parquet", plain_table),
    "deep rows": ("data", "x.json", text(b'[{"prompt": "a"}, ' + DEEP)),
    "a deep line": ("data", "x.jsonl", text(b'{"prompt": ' + DEEP + b"\n")),
    "a long number": (
        "data",
        "x.jsonl",
        text(b'{"prompt": "a", "timestamp": "' + b"9" * 5_000_000 + b'"}\n'),
    ),
    "a trace of zeros": ("trace", "x.jsonl", sparse()),
    "a trace in zstd": ("trace", "x.csv.zst", zst(b"TIMESTAMP,ContextTokens,GeneratedTokens\n" * 9999, 5000)),
    "a trace whose header is line breaks": ("trace", "x.csv.zst", zst(b'"' + b"\n" * 2000 + b'"\n1\n', 1)),
    "data whose header is line breaks": ("data", "x.csv", text(b'"' + b"\n" * 2000 + b'"\n1\n')),
    "lengths whose header is long": ("lengths", "x.csv", text(b'a,"' + b"b\n" * 2000 + b'"\n1,1\n')),
    "a result whose keys are line breaks": ("result", "x.json", text(b'{"' + b"\\n" * 2000 + b'": 1}')),
    "times of zeros": ("times", "x.txt", sparse()),
    "times in zstd": ("times", "x.txt.zst", zst(b"0\n" * 500_000, 1000)),
    "a config of zeros": ("config", "config.json", sparse()),
    "a deep config": ("config", "config.json", text(b'{"a": ' + DEEP)),
    "a config with a long number": ("config", "config.json", text(b'{"a": ' + b"9" * 100_000 + b"}")),
    "a model of zeros": ("model", "config.json", sparse()),
    "a deep model": ("model", "config.json", text(DEEP)),
    "a model of bytes": ("model", "config.json", text(b"\xff\xfe\x00")),
    "a tokenizer of zeros": ("tokenizer", "tokenizer.json", sparse()),
    "a deep tokenizer": ("tokenizer", "tokenizer.json", text(DEEP)),
    "a template of zeros": ("template", "chat_template.jinja", sparse()),
    "a device of zeros": ("device", "x.toml", sparse()),
    "a deep device": ("device", "x.toml", text(b"x = " + DEEP)),
    "a device of dots": ("device", "x.toml", text(b"a" + b".a" * 100_000 + b" = 1")),
    "a device of bytes": ("device", "x.toml", text(b"\xff\xfe\x00")),
    "a calibration of zeros": ("calibration", "x.toml", sparse()),
    "a deep calibration": ("calibration", "x.toml", text(b"x = " + DEEP)),
    "a result of zeros": ("result", "x.json", sparse()),
    "a deep result": ("result", "x.json", text(DEEP)),
    "a suite of zeros": ("suite", "x.toml", sparse()),
    "a deep suite": ("suite", "x.toml", text(b"x = " + DEEP)),
}


def read_all(files: list[tuple[str, Path]]) -> list[tuple[str, float, int]]:
    """What each reader says in one process for all, after how long, and the process's peak until then."""
    argv = [sys.executable, "-P", "-c", READ, json.dumps([(kind, str(path)) for kind, path in files])]
    env = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run(argv, capture_output=True, text=True, env=env, timeout=900, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return [tuple(json.loads(line)) for line in done.stdout.splitlines()]


def check_bombs(names: list[str], files: list[tuple[str, Path]], *, may_be_read: bool = False) -> None:
    began_s = time.monotonic()
    seen = read_all(files)
    for name, (said, time_s, peak) in zip(names, seen, strict=True):
        assert may_be_read or said != "read", name
        assert "\n" not in said, (name, said)
        assert len(said) < 1000, (name, said[:300])
        assert peak < MOST_RSS, (name, said, peak >> 20)
        assert time_s < MOST_S, (name, said, time_s)
    most = max(peak for _, _, peak in seen) >> 20
    noted(f"{len(names)} bombs", "a line each", f"a line each, {most} MB", time.monotonic() - began_s)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_bomb_is_refused_in_a_line_and_in_little_memory(tmp_path: Path) -> None:
    files = []
    for k, (kind, name, write) in enumerate(BOMBS.values()):
        (tmp_path / str(k)).mkdir()
        write(tmp_path / str(k) / name)
        files.append((kind, tmp_path / str(k) / name))
    check_bombs(list(BOMBS), files)


def drawn(rng: random.Random, path: Path) -> tuple[str, Path]:
    """A file whose beginning, unit, packing and kind are drawn."""
    kind, ends = rng.choice(
        [
            ("data", (".jsonl", ".json", ".csv", ".txt", ".jsonl.zst", ".json.zst", ".csv.zst", ".json.gz")),
            ("trace", (".jsonl", ".csv", ".jsonl.zst", ".csv.zst")),
            ("times", (".txt", ".txt.zst")),
            ("config", ("config.json",)),
            ("model", ("config.json",)),
            ("device", (".toml",)),
            ("result", (".json",)),
            ("suite", (".toml",)),
        ]
    )
    begin = rng.choice([b"", b"[", b'{"a": ', b'[{"prompt": "', b"x = ", b"prompt\n", b"\xef\xbb\xbf[", b'"'])
    unit = rng.choice(
        [b"\0", b"[", b"{", b"9", b"a.", b'"a",', b"\n", b'{"prompt":"a"}\n', b'{"prompt":"a"},', b"\\", b" "]
    )
    part = unit * max(1, (1 << rng.randint(10, 20)) // len(unit))
    end = rng.choice(ends)
    path = path / end if not end.startswith(".") else path / f"x{end}"
    n = rng.choice([1, 8, 300]) if end.endswith((".zst", ".gz")) else 1
    if end.endswith(".zst"):
        zst(begin + part, n)(path)
    elif end.endswith(".gz"):
        gz(begin + part, n // 10 + 1)(path)
    else:
        path.write_bytes(begin + part * n)
        if rng.random() < 0.3:
            os.truncate(path, 3 << 30)
    return kind, path


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_drawn_files_are_read_or_refused_in_a_line_and_in_little_memory(tmp_path: Path) -> None:
    files = []
    for k in range(N_DRAWN):
        (tmp_path / str(k)).mkdir()
        files.append(drawn(random.Random(f"bombs {SEED} {k}"), tmp_path / str(k)))
    check_bombs([f"{k}: {kind} {path.name}" for k, (kind, path) in enumerate(files)], files, may_be_read=True)
