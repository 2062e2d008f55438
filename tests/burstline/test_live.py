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


def test_a_missing_reading_is_not_zero(tmp_path):
    path = tmp_path / "telemetry.jsonl"
    path.write_bytes(as_lines([Row(0, "server", "rss_bytes", None, "not provided")]))
    live = LiveTelemetry(path)
    live.refresh()
    assert live.memory_bytes is None
