"""How requests are asked, at a real vLLM on a CPU: adapters, chat, headers, TLS behind nginx, hanging up."""

import os
import shutil
import subprocess
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from burstline import cli
from burstline.measure.record.rundir import Run, open_run
from burstline.servers.host import process
from burstline.servers.host.ready import send
from burstline.servers.messages import Target
from burstline.servers.openai import reply_content
from burstline.servers.registry import ENGINES
from burstline.workloads.request import Request
from tests.servers.lives import ADAPTERS, Life, Lives, of
from tests.verdicts import done

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

N = 12
NGINX = shutil.which("nginx", path=f"{os.environ.get('PATH', '')}:/usr/sbin")
needs_nginx = pytest.mark.skipif(NGINX is None, reason="nginx is not installed")


@pytest.fixture(params=[of("vllm")])
def server(request: pytest.FixtureRequest, lives: Lives) -> Life:
    return lives(request.param)


def run(out: Path, *words: str) -> Run:
    """The run of such a load; a client that is too slow on a busy machine makes it no failure."""
    load = ("--requests", str(N), "--prompt-tokens", "32", "--output-tokens", "8", "--model", "tiny")
    quiet = ("--no-canary", "-q", "--out", str(out))
    assert done(cli.main(["run", "--engine", "vllm", *load, *quiet, *words]), out)
    (folder,) = out.iterdir()
    return open_run(folder)


def outcomes(made: Run) -> Counter[str]:
    return Counter(made.record_table.to_pandas()["outcome"])


def test_adapters_answer_differently_and_requests_name_them_in_turn(server: Life, tmp_path: Path) -> None:
    request = Request(0, tuple(range(5, 37)), None, 32, 8)
    texts = {}
    for name in ("tiny", *ADAPTERS):
        named = Target(server.url, name)
        reply = send(named, ENGINES["vllm"].encode(request, named), 120)
        content = reply_content(reply)
        assert content is not None, reply.body
        texts[name] = content.text
    print(texts)
    assert len(set(texts.values())) == 3
    assert outcomes(run(tmp_path / "both", "--url", server.url, "--lora", "one,two")) == {"ok": N}
    words = ["run", "--engine", "vllm", "--url", server.url, "--model", "tiny", "--requests", "4", "-q"]
    lost = cli.main([*words, "--lora", "three", "--out", str(tmp_path / "x")])
    assert lost != 0  # vLLM knows no adapter of that name, so the name reached it


def test_the_chat_endpoint_takes_sampling_and_extra_fields(server: Life, tmp_path: Path) -> None:
    words = ("--endpoint", "chat", "--tokenizer", str(server.model), "--temperature", "0.8", "--top-p", "0.9")
    made = run(tmp_path / "runs", "--url", server.url, *words, "--extra-body", '{"top_k": 5}')
    assert outcomes(made) == {"ok": N}
    assert set(made.record_table.to_pandas()["output_tok"]) == {8}


def test_a_server_frees_the_kv_cache_of_clients_that_hang_up(server: Life, tmp_path: Path) -> None:
    n = 3 * N
    words = (
        "--requests",
        str(n),
        "--concurrency",
        "6",
        "--output-tokens",
        "900",
        "--cancel-share",
        "50%,after=4",
    )
    summary = run(tmp_path / "runs", "--url", server.url, *words).summary
    assert summary is not None
    memory, tokens = summary.memory, summary.conservation
    print(summary.counts, memory.kv_peak_fraction, memory.kv_after_fraction, memory.running_after, tokens)
    assert summary.counts == {"planned": n, "ok": n // 2, "abandoned": n // 2}
    assert memory.kv_peak_fraction.point > 0
    assert (memory.running_after.point, memory.kv_after_fraction.point) == (0, 0)
    # Of the abandoned replies it has generated a part and no more.
    assert tokens.output_server_tok.point < 0.8 * n * 900
    assert "abandoned" in {warning.code for warning in summary.verdict.warnings}


@contextmanager
def nginx(folder: Path, upstream: str) -> Iterator[tuple[str, Path, Path]]:
    """TLS in front of a server, by a certificate of our own authority: URL, the authority, the access log."""
    folder.mkdir()
    openssl = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"]
    names = ["-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1"]
    files = ["-keyout", str(folder / "key.pem"), "-out", str(folder / "ca.pem")]
    subprocess.run([*openssl, *names, *files], check=True, capture_output=True)
    port = process.free_port()
    (folder / "nginx.conf").write_text(f"""
        daemon off; pid {folder}/pid; error_log {folder}/error.log; worker_processes 1;
        events {{ }}
        http {{
            log_format team '$status $http_x_team $uri'; access_log {folder}/access.log team;
            client_body_temp_path {folder}/body; proxy_temp_path {folder}/proxy;
            fastcgi_temp_path {folder}/f; uwsgi_temp_path {folder}/u; scgi_temp_path {folder}/s;
            server {{
                listen 127.0.0.1:{port} ssl;
                ssl_certificate {folder}/ca.pem; ssl_certificate_key {folder}/key.pem;
                location / {{
                    proxy_pass {upstream}; proxy_http_version 1.1; proxy_buffering off;
                    proxy_set_header Connection "";
                }}
            }}
        }}
    """)
    assert NGINX is not None
    with subprocess.Popen([NGINX, "-c", str(folder / "nginx.conf"), "-p", str(folder)]) as running:
        try:
            yield f"https://127.0.0.1:{port}", folder / "ca.pem", folder / "access.log"
        finally:
            running.terminate()


@needs_nginx
def test_tls_by_an_authority_of_ones_own_and_headers_reach_the_server_behind_nginx(
    server: Life, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with nginx(tmp_path / "nginx", server.url) as (url, authority, log):
        trusted = ("--url", url, "--ca-bundle", str(authority), "--header", "X-Team: blue")
        assert outcomes(run(tmp_path / "trusted", *trusted)) == {"ok": N}
        rows = [line.split() for line in log.read_text().splitlines()]
        completions = [row for row in rows if row[2] == "/v1/completions"]
        assert len(completions) >= N
        assert {row[1] for row in rows} == {"blue"}  # probes and gauges are asked with it, too
        assert outcomes(run(tmp_path / "any", "--url", url, "--insecure")) == {"ok": N}
        words = ["run", "--engine", "vllm", "--url", url, "--model", "tiny", "--requests", "4", "-q"]
        capfd.readouterr()
        code = cli.main([*words, "--out", str(tmp_path / "not")])
        error = capfd.readouterr().err
    assert code != 0
    print(error)
    assert "certificate" in error.lower()
    assert "--ca-bundle" in error
