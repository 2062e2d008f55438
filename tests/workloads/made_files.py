"""A file of every format that a load can come from, with as many rows as a test needs, made on the spot."""

import csv
import json
import string
from collections.abc import Callable
from pathlib import Path

import numpy as np

MAX_PROMPT_TOK, MAX_OUTPUT_TOK = 400, 6


def _rng() -> np.random.Generator:
    return np.random.Generator(np.random.PCG64(14))


def _texts(n: int) -> list[str]:
    """Sentences of 5 to 60 made-up words, some with letters beyond ASCII."""
    rng = _rng()
    letters = list(string.ascii_lowercase + "éüß")
    words = ["".join(rng.choice(letters, rng.integers(2, 9))) for _ in range(500)]
    return [" ".join(rng.choice(words, rng.integers(5, 60))).capitalize() + "." for _ in range(n)]


def _lengths(n: int) -> tuple[list[int], list[int]]:
    rng = _rng()
    return rng.integers(1, MAX_PROMPT_TOK, n).tolist(), rng.integers(1, MAX_OUTPUT_TOK, n).tolist()


def times_s(n: int, gap_s: float = 0.02) -> list[float]:
    """Ascending times from 0, exponential gaps, to the millisecond."""
    at_s = np.cumsum(_rng().exponential(gap_s, n))
    return np.round(at_s - at_s[0], 3).tolist()


def _jsonl(path: Path, rows: list[dict]) -> Path:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    return path


def _csv(path: Path, header: list[str], rows: list[tuple]) -> Path:
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(header)
        writer.writerows(rows)
    return path


def jsonl(folder: Path, n: int) -> Path:
    outputs = _lengths(n)[1]
    rows = zip(_texts(n), outputs, times_s(n), strict=True)
    return _jsonl(
        folder / "prompts.jsonl",
        [{"prompt": text, "output_tokens": k, "timestamp": at} for text, k, at in rows],
    )


def chats(folder: Path, n: int) -> Path:
    texts = _texts(2 * n)
    return _jsonl(
        folder / "chats.jsonl",
        [{"messages": [{"role": "system", "content": a}, {"role": "user", "content": b}], "output_tokens": 3}
         for a, b in zip(texts[::2], texts[1::2], strict=True)],
    )  # fmt: skip


def sharegpt(folder: Path, n: int) -> Path:
    texts = _texts(2 * n)
    rows = [
        {"id": f"row{k}", "conversations": [{"from": "human", "value": a}, {"from": "gpt", "value": b[:9]}]}
        for k, (a, b) in enumerate(zip(texts[::2], texts[1::2], strict=True))
    ]
    (folder / "sharegpt.json").write_text(json.dumps(rows, ensure_ascii=False))
    return folder / "sharegpt.json"


def text(folder: Path, n: int) -> Path:
    (folder / "prompts.txt").write_text("\n".join(_texts(n)) + "\n")
    return folder / "prompts.txt"


def parquet(folder: Path, n: int) -> Path:
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(
        pa.table({"prompt": _texts(n), "output_tokens": _lengths(n)[1]}), folder / "prompts.parquet"
    )
    return folder / "prompts.parquet"


def hugging_face(folder: Path, n: int) -> Path:
    import datasets

    datasets.disable_progress_bars()
    rows = {"text": _texts(n), "output_tokens": _lengths(n)[1]}
    datasets.Dataset.from_dict(rows).save_to_disk(str(folder / "dataset"))
    return folder / "dataset"


def mooncake(folder: Path, n: int, longest_tok: int = 1500, gap_s: float = 0.02) -> Path:
    """Prompts of chained blocks, as Mooncake's: a hash names its block and all before it.

    A third go on from an earlier prompt, a third begin as one of the first eight did, the rest are new.
    """
    rng, block_tok = _rng(), 512
    n_hashes = 0
    chains: list[list[int]] = []
    rows = []
    for at_s in times_s(n, gap_s):
        kind, n_tok = rng.integers(0, 3), int(rng.integers(64, longest_tok))
        n_blocks = -(-n_tok // block_tok)
        base: list[int] = []
        if kind == 0 and chains:
            base = chains[int(rng.integers(0, len(chains)))]
        elif kind == 1 and len(chains) >= 8:
            base = chains[int(rng.integers(0, 8))]
        full = base[: min(len(base), n_blocks, int(rng.integers(0, len(base) + 1)))]
        chain = [*full, *range(n_hashes, n_hashes + n_blocks - len(full))]
        n_hashes += n_blocks - len(full)
        # The last block is rarely full, so that no other prompt may go on behind it.
        chains.append(chain[: n_tok // block_tok])
        rows.append(
            {"timestamp": round(at_s * 1e3), "input_length": n_tok, "output_length": 1 + n_tok % 3,
             "hash_ids": chain}
        )  # fmt: skip
    return _jsonl(folder / "mooncake.jsonl", rows)


def azure(folder: Path, n: int) -> Path:
    rows = [
        (f"2024-05-10 00:{int(at // 60):02d}:{at % 60:06.3f}000+00:00", *lengths)
        for at, *lengths in zip(times_s(n), *_lengths(n), strict=True)
    ]
    return _csv(folder / "azure.csv", ["TIMESTAMP", "ContextTokens", "GeneratedTokens"], rows)


def burstgpt(folder: Path, n: int) -> Path:
    header = ["Timestamp", "Model", "Request tokens", "Response tokens", "Total tokens", "Log Type"]
    rows = [
        (at, "ChatGPT", a, b, a + b, "Conversation log")
        for at, a, b in zip(times_s(n), *_lengths(n), strict=True)
    ]
    return _csv(folder / "burstgpt.csv", header, rows)


def own_trace(folder: Path, n: int) -> Path:
    rows = [
        {"timestamp": at, "prompt_tokens": a, "output_tokens": b}
        for at, a, b in zip(times_s(n), *_lengths(n), strict=True)
    ]
    return _jsonl(folder / "trace.jsonl", rows)


DATA: dict[str, Callable[[Path, int], Path]] = {
    "JSON lines": jsonl,
    "chats": chats,
    "ShareGPT": sharegpt,
    "text": text,
    "Parquet": parquet,
    "datasets": hugging_face,
}
TRACES: dict[str, Callable[[Path, int], Path]] = {
    "Mooncake": mooncake,
    "Azure": azure,
    "BurstGPT": burstgpt,
    "Burstline": own_trace,
}
