"""Prefix-cache hits as expected and as counted with a small KV cache, and what makes them differ."""

import contextlib
import random
import re
import signal

import httpx
import pytest

from burstline.measure.record.rundir import Run, open_run
from burstline.measure.stats.figure import known
from burstline.servers.host import process
from burstline.servers.host.ready import wait_ready
from burstline.servers.launch import LaunchOptions
from burstline.servers.messages import Target
from burstline.servers.registry import ENGINES
from tests.burstline import inside
from tests.burstline.test_run import burstline, finished, the_run, wait_until
from tests.pitfalls.proxy import late_proxy
from tests.servers import lives as lived
from tests.verdicts import done

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600), pytest.mark.usefixtures("without_page")]

PREFIXES = ("--prompt-tokens", "200", "--output-tokens", "8", "--shared-prefix")
TURNS = ("--prompt-tokens", "128", "--turn-tokens", "32..64", "--output-tokens", "8")
LOADS = {
    "burst": ("--requests", "40", *PREFIXES, "96,groups=6"),
    "prefixes": ("--requests", "150", *PREFIXES, "128,groups=12", "--concurrency", "4"),
    "sessions": ("--sessions", "16", "--turns", "4", *TURNS, "--rate", "6", "--think-s", "1"),
    "preempted": ("--requests", "60", "--prompt-tokens", "150..250", "--output-tokens", "60",
                  "--shared-prefix", "128,groups=8"),
}  # fmt: skip


@contextlib.contextmanager
def serving(folder, *flags, port=None):
    """The URL of an embedded engine of its own."""
    engine, port = ENGINES["reference"], port or process.free_port()
    url = f"http://127.0.0.1:{port}"
    options = LaunchOptions("", "127.0.0.1", port, "tiny", folder, None, flags)
    with process.start(engine.launch(options), folder / "server.log") as server:
        wait_ready(engine, server, Target(url, "tiny"), timeout_s=300)
        yield url


@pytest.fixture(
    params=[lived.of("reference-small-cache"), lived.of("vllm-small-cache", marks=[pytest.mark.thorough])]
)
def small(request, lives):
    """An engine's name and the URL of its server, whose KV cache holds 2,048 tokens."""
    life = lives(request.param)
    return life.engine, life.url


@pytest.fixture
def large(lives):
    """The URL of an embedded engine whose cache has room for everything."""
    return lives("reference").url


def ran(out, url, *load, engine="reference", how=inside.ran) -> Run:
    code, output = how(out, "--engine", engine, "--url", url, *load)
    assert done(code, out), output
    return open_run(the_run(out))


def causes(run: Run) -> list[str]:
    warnings = run.summary.verdict.warnings
    print("\n", [reason.text for reason in warnings if reason.code.startswith("prefix-")])
    return [reason.code for reason in warnings if reason.code.startswith("prefix-")]


@pytest.mark.parametrize("load", LOADS)
def test_the_hits_of_a_small_cache_are_those_of_its_simulation(load, small, tmp_path):
    engine, url = small
    run = ran(tmp_path / "runs", url, *LOADS[load], engine=engine)
    cache, total_tok = run.summary.prefix_cache, run.summary.prefix_cache.prompt_tok.point
    n_preempted = known(run.watched.over(run.columns.end_s).grown("engine", "preemptions", "1"))
    shares = {row.name: f"{row.figure.point / total_tok:.2%}" for row in cache.rows() if known(row.figure)}
    print(f"\n{engine}, {load}: {n_preempted:.0f} preemptions", shares)
    assert cache.simulated_tok.point == pytest.approx(cache.counted_tok.point, abs=0.02 * total_tok)
    assert cache.simulated_tok.point < cache.infinite_tok.point
    assert n_preempted > 0 or load != "preempted"
    assert not causes(run)


def test_a_cache_that_an_earlier_run_filled_is_told(large, tmp_path):
    again = ("--requests", "40", *PREFIXES, "96,groups=6", "--salt", "5eed", "--seed", "7")
    assert causes(ran(tmp_path / "cold", large, *again)) == []
    assert causes(ran(tmp_path / "warm", large, *again)) == ["prefix-more"]


def test_prompts_that_reach_the_engine_with_a_salt_each_are_told(large, tmp_path):
    def salted(data: bytes) -> bytes:
        """Another first token id, of as many digits."""
        return re.sub(rb'(?<="prompt":\[)\d+', lambda own: b"%d" % _other(len(own[0])), data)

    with late_proxy(large, 0.0, salted) as url:
        # In a process of its own: the proxy is in this one.
        run = ran(tmp_path, url, "--requests", "40", *PREFIXES, "96,groups=6", "--rate", "20", how=finished)
    assert causes(run) == ["prefix-none"]


def _other(n_digits: int) -> int:
    return random.randrange(10 ** (n_digits - 1), 8 * 10 ** (n_digits - 1))


def test_a_cache_that_is_off_is_told(tmp_path):
    with serving(tmp_path, "--no-enable-prefix-caching") as url:
        run = ran(tmp_path / "runs", url, "--requests", "40", *PREFIXES, "96,groups=6")
    assert causes(run) == ["prefix-off"]


def test_an_engine_that_restarts_in_the_middle_is_told(tmp_path):
    # Until both have been read, however long a busy machine takes to start one again.
    port, load = process.free_port(), ("--requests", "3000", *PREFIXES, "96,groups=6", "--rate", "10")
    where = ("--engine", "reference", "--url", f"http://127.0.0.1:{port}")
    with contextlib.ExitStack() as client:
        with serving(tmp_path, port=port) as url:
            running = client.enter_context(burstline(tmp_path / "runs", *where, *load))
            wait_until(lambda: _hit_tok(url) > 6000)  # more than the second has where it is first read
        with serving(tmp_path, port=port):
            wait_until(lambda: _hit_tok(url) > 1000)
            running.send_signal(signal.SIGINT)
            running.communicate(timeout=100)
    assert causes(open_run(the_run(tmp_path / "runs"))) == ["prefix-restarted"]


def _hit_tok(url: str) -> float:
    text = httpx.get(f"{url}/metrics").text
    return float(re.search(r"(?m)^vllm:prefix_cache_hits_total.* (\S+)$", text)[1])
