"""The display's view of a telemetry file that grows."""

from burstline.bench.progress import LiveTelemetry
from burstline.servers.host.telemetry import Row, as_lines


def test_the_newest_memory_and_the_rate_between_two_counts_are_shown(tmp_path):
    path = tmp_path / "telemetry.jsonl"
    live = LiveTelemetry(path)
    live.refresh()
    assert (live.memory_bytes, live.tok_per_s) == (None, None)
    path.write_bytes(
        as_lines([Row(0, "server", "rss_bytes", 5e8), Row(0, "engine", "generation_tokens", 100)])
    )
    live.refresh()
    with path.open("ab") as file:
        file.write(as_lines([Row(2_000_000_000, "engine", "generation_tokens", 300)]) + b'[1, "ser')
    live.refresh()
    assert (live.memory_bytes, live.tok_per_s) == (5e8, 100.0)


def test_no_rate_is_told_between_two_ends_of_requests_at_a_server_that_counts_there(tmp_path):
    """As llama.cpp does: 154 replies in, "0 tok/s" would be false."""
    path = tmp_path / "telemetry.jsonl"
    counts = [(0, 0), (1_000_000_000, 6400), (2_000_000_000, 6400)]
    path.write_bytes(as_lines([Row(at_ns, "engine", "generation_tokens", n) for at_ns, n in counts]))
    live = LiveTelemetry(path)
    live.refresh()
    assert (live.tok, live.tok_per_s) == (6400, None)


def test_no_tokens_are_told_where_the_engine_counted_fewer_than_came(tmp_path):
    """150 first tokens are 150 tokens at least, and an engine that counts at the end stays behind."""
    path, counts = tmp_path / "telemetry.jsonl", iter([7, 7, 7, 263, 3847])
    live, told = LiveTelemetry(path), []
    for k, begun in enumerate((0, 120, 150, 150, 150)):
        with path.open("ab") as file:
            file.write(as_lines([Row(k * 10**9, "engine", "generation_tokens", next(counts))]))
        live.refresh(begun)
        told.append((live.tok, live.tok_per_s))
    assert told == [(0, None), *[(None, None)] * 4]


def test_tokens_that_came_since_the_last_reading_do_not_make_a_count_late(tmp_path):
    path = tmp_path / "telemetry.jsonl"
    path.write_bytes(as_lines([Row(0, "engine", "generation_tokens", 0)]))
    live = LiveTelemetry(path)
    live.refresh(30)
    assert (live.tok, live.tok_per_s) == (None, None)
    with path.open("ab") as file:
        file.write(as_lines([Row(10**9, "engine", "generation_tokens", 40)]))
    live.refresh(60)
    assert live.tok is None
    with path.open("ab") as file:
        file.write(as_lines([Row(2 * 10**9, "engine", "generation_tokens", 200)]))
    live.refresh(90)
    assert (live.tok, live.tok_per_s) == (200, 160.0)


def test_a_missing_reading_is_not_zero(tmp_path):
    path = tmp_path / "telemetry.jsonl"
    path.write_bytes(as_lines([Row(0, "server", "rss_bytes", None, "not provided")]))
    live = LiveTelemetry(path)
    live.refresh()
    assert live.memory_bytes is None
