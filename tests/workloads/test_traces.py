"""Traces come back with their times, lengths and prefixes, or say in which row they are wrong."""

import json
from pathlib import Path

import numpy as np
import pytest

from burstline.workloads.plan import PrefixTree, expected_hit_fraction, hits
from burstline.workloads.prompts import salted, vocabulary_from_size
from burstline.workloads.request import WorkloadError
from burstline.workloads.traces import read_trace
from burstline.workloads.works import Recorded
from tests.workloads import made_files

DATA = Path(__file__).parents[1] / "data" / "workloads"
VOCABULARY = vocabulary_from_size(32_000)


@pytest.mark.parametrize(
    ("name", "title", "n", "dropped"),
    [
        ("mooncake.jsonl", "Mooncake", 60, 0),
        ("azure2023.csv", "Azure", 40, 0),
        ("azure2024.csv", "Azure", 40, 0),
        ("burstgpt.csv", "BurstGPT", 36, 4),
        ("trace.jsonl", "Burstline", 40, 0),
    ],
)
def test_each_format_is_recognised_and_failed_requests_are_counted(name, title, n, dropped):
    trace = read_trace(str(DATA / name))
    assert (trace.title, len(trace), sum(trace.dropped.values())) == (title, n, dropped)
    assert trace.at_s[0] == 0
    assert (np.diff(trace.at_s) >= 0).all()
    requests = trace.requests(VOCABULARY, 0)
    assert [len(r.prompt_ids) for r in requests] == trace.n_prompt_tok.tolist()


def test_times_keep_their_distances():
    rows = [json.loads(line) for line in (DATA / "mooncake.jsonl").read_text().splitlines()]
    at_s = np.array([row["timestamp"] for row in rows]) / 1e3
    assert read_trace(str(DATA / "mooncake.jsonl")).at_s == pytest.approx(at_s - at_s[0])
    azure = read_trace(str(DATA / "azure2024.csv")).at_s
    first, second = ((DATA / "azure2024.csv").read_text().splitlines()[k][17:26] for k in (1, 2))
    assert azure[1] == pytest.approx(float(second) - float(first), abs=1e-9)


def implied_hits(rows: list[dict]) -> list[int]:
    """What the hash ids themselves say: leading blocks that some earlier request had, at most as long."""
    seen: dict[tuple[int, ...], int] = {}
    counts = []
    for row in rows:
        n_tok = 0
        for k in range(len(row["hash_ids"])):
            size = min(512, row["input_length"] - 512 * k)
            n_tok += min(size, seen.get(tuple(row["hash_ids"][: k + 1]), 0))
            if seen.get(tuple(row["hash_ids"][: k + 1]), 0) < size:
                break
        for k in range(len(row["hash_ids"])):
            size, chain = min(512, row["input_length"] - 512 * k), tuple(row["hash_ids"][: k + 1])
            seen[chain] = max(size, seen.get(chain, 0))
        counts.append(min(n_tok, row["input_length"] - 1) // 16 * 16)
    return counts


def test_hash_ids_become_prefixes_that_an_infinite_cache_serves():
    rows = [json.loads(line) for line in (DATA / "mooncake.jsonl").read_text().splitlines()]
    requests = read_trace(str(DATA / "mooncake.jsonl")).requests(VOCABULARY, 0)
    by_hashes, by_segments = implied_hits(rows), PrefixTree().add(requests)
    by_tokens = hits([salted(request, "5eed", VOCABULARY).prompt_ids for request in requests])
    assert by_hashes == by_segments == by_tokens
    assert sum(by_hashes) > 1000
    assert expected_hit_fraction(requests, "5eed") == sum(by_hashes) / sum(r["input_length"] for r in rows)


@pytest.mark.parametrize(
    "ids",
    [
        [7 + (k << 60) for k in range(16)],  # 64-bit hashes that differ in their upper bits alone
        [2**64 - 1 - k for k in range(16)],
        [-1 - k for k in range(16)],
        [f"{k:032x}" for k in range(16)],
        [*range(8), *map(str, range(8))],
    ],
)
def test_different_hashes_of_any_size_or_kind_are_different_prompts(tmp_path, ids):
    file = tmp_path / "trace.jsonl"
    rows = [
        {"timestamp": k, "input_length": 512, "output_length": 5, "hash_ids": [one]}
        for k, one in enumerate(ids)
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in [*rows, rows[3] | {"timestamp": 99}]))
    requests = read_trace(str(file)).requests(VOCABULARY, 0)
    assert len({tuple(request.prompt_ids) for request in requests}) == 16
    assert PrefixTree().add(requests) == [*[0] * 16, 496], (
        "of the one that comes again all but its last block"
    )


def test_bailians_traces_count_in_seconds_and_in_blocks_of_sixteen(tmp_path):
    row = {"chat_id": 1, "parent_chat_id": -1, "timestamp": 61.0, "input_length": 40, "output_length": 5,
           "type": "text", "turn": 1, "hash_ids": [1, 2, 3]}  # fmt: skip
    later = {
        "chat_id": 2,
        "parent_chat_id": 1,
        "timestamp": 63.5,
        "input_length": 50,
        "hash_ids": [1, 2, 4, 5],
    }
    file = tmp_path / "trace.jsonl"
    file.write_text(f"{json.dumps(row)}\n{json.dumps(row | later)}\n")
    trace = read_trace(str(file))
    assert (trace.title, trace.at_s.tolist()) == ("Qwen-Bailian", [0.0, 2.5])
    first, second = trace.requests(VOCABULARY, 0)
    assert first.prompt_ids[:32] == second.prompt_ids[:32]
    assert first.prompt_ids[32:40] != second.prompt_ids[32:40]


@pytest.mark.parametrize(
    ("unit", "speed", "title"),
    [
        (1000, 1.0, "of 5 requests/s"),
        (1, 1.0, "of 5,000 requests/s"),
        (1000, 2.0, "of 5 requests/s at 2 times its speed"),
    ],
)
def test_the_load_names_the_recorded_rate(tmp_path, unit, speed, title):
    """Times in seconds under Mooncake's columns, which are milliseconds, are seen at once."""
    file = tmp_path / "trace.jsonl"
    file.write_text("".join(MOONCAKE % (round(0.2 * unit * k, 3), 9, "[]") for k in range(6)))
    assert Recorded(read_trace(str(file)), speed).title == f"Mooncake trace {title}"


def test_a_window_keeps_the_prefixes_of_what_is_in_it():
    trace = read_trace(str(DATA / "mooncake.jsonl"))
    window = trace.window(2.0, 5.0)
    first = int(np.searchsorted(trace.at_s, 2.0))
    assert window.at_s == pytest.approx(trace.at_s[first : first + len(window)] - 2.0)
    one, two = trace.requests(VOCABULARY, 0)[first], window.requests(VOCABULARY, 0)[0]
    assert one.prompt_ids[:256] == two.prompt_ids[:256]
    with pytest.raises(WorkloadError, match=r"--trace: window=900\.\.901"):
        trace.window(900, 901)


MOONCAKE = '{"timestamp": %s, "input_length": %s, "output_length": 5, "hash_ids": %s}\n'


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ('{"a": 1}\n', "row 1 has columns a; expected"),
        (MOONCAKE % (0, 9, "[1]") + MOONCAKE % (-5, 9, "[1]"), "row 2: timestamp is -5"),
        (MOONCAKE % (9, 9, "[1]") + "\n" + MOONCAKE % (5, 9, "[1]"), "row 3 is 0.004 s earlier than row 1"),
        (MOONCAKE % (0, "NaN", "[1]"), "row 1 is not JSON.*no NaN"),
        (MOONCAKE % (0, 9.5, "[1]"), "row 1: input_length is 9.5"),
        (MOONCAKE % (0, 9, "[1, 2]"), "row 1: 2 hash_ids of 512 tokens for a prompt of 9"),
        (MOONCAKE % (0, 9, "[[1]]"), "row 1: hash_ids"),
        (MOONCAKE % (0, 9, "[1.5]"), "row 1: hash_ids"),
        (MOONCAKE % (0, 9, "[true]"), "row 1: hash_ids"),
        (MOONCAKE % (0, 0, "[]"), "no row has both"),
    ],
)
def test_a_silly_trace_names_its_row(tmp_path, content, words):
    file = tmp_path / "trace.jsonl"
    file.write_text(content)
    with pytest.raises(WorkloadError, match=words):
        read_trace(str(file))


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        (["2023-11-16 18:15:46.6,5,5", "yesterday,5,5"], "row 3: TIMESTAMP is 'yesterday'"),
        (["2023-11-16 18:15:46.6,5,5", "2023-11-16 18:15:45,5,5"], "row 3 is 1.6 s earlier"),
        (["2023-11-16 18:15:46.6,5"], "row 2"),
        ([], "row 1: there is only a header; expected at least one row"),
        (["2023-11-16 18:15:46.6,nan,5"], "row 2: ContextTokens is 'nan'"),
        (["2023-11-16 18:15:46.6,,5"], "row 2: ContextTokens is None"),
    ],
)
def test_a_silly_table_names_its_row(tmp_path, rows, words):
    file = tmp_path / "trace.csv"
    file.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows, ""]))
    with pytest.raises(WorkloadError, match=words):
        read_trace(str(file))


def hits_by_hash(rows: list[dict], block_tok: int = 512) -> list[int]:
    """What a cache without limits serves of each prompt by its hashes: whole blocks, never the last token."""
    held: set[int] = set()
    counts = []
    for row in rows:
        whole = row["hash_ids"][: row["input_length"] // block_tok]
        n = next((k for k, key in enumerate(whole) if key not in held), len(whole))
        counts.append(min(n, (row["input_length"] - 1) // block_tok) * block_tok)
        held.update(whole)
    return counts


@pytest.mark.slow
def test_ten_thousand_mooncake_requests_hit_as_their_hashes_say(tmp_path):
    path = made_files.mooncake(tmp_path, 10_000, longest_tok=3000)
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    implied = hits_by_hash(rows)
    plan = read_trace(str(path)).requests(VOCABULARY, 0)
    assert sum(implied) / sum(row["input_length"] for row in rows) > 0.2
    assert PrefixTree().add(plan, 512) == implied, "of the plan's prefixes"
    assert hits((request.prompt_ids for request in plan), 512) == implied, "of the token ids that are sent"
