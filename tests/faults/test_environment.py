"""Faults of what lies around a run: the server's host, the network, proxies, the terminal, the shell, the disk."""

from __future__ import annotations

import contextlib
import csv
import io
import os
import pty
import shutil
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from burstline.bench.progress import progress_for
from burstline.measure.record.columns import columns_of
from burstline.measure.record.rundir import open_run
from burstline.measure.record.tables import record_table
from burstline.measure.verdict.buffering import gathered
from burstline.servers.host.process import free_port
from tests.faults import hostile
from tests.faults.lab import REPOSITORY, Shot, burstline, counted, noted, shoot, verb
from tests.truth.rig import truth_server
from tests.truth.script import Script
from tests.verdicts import done

# The network: a driver alone.


def restarted(folder: Path) -> Shot:
    """A server that goes away for a while in the middle of the load, and comes back at the same port."""
    shots: list[Shot] = []
    with hostile.serving(hostile.honest) as first:
        port = int(first.url.rpartition(":")[2])
        load = threading.Thread(target=lambda: shots.append(shoot(first.url, folder, 200, every_ms=10)))
        load.start()
        while first.n_load < 20:
            time.sleep(0.002)
    time.sleep(0.1)
    with hostile.serving(hostile.honest, port=port):
        load.join()
    return shots[0]


def answers_early(folder: Path) -> Shot:
    """The whole reply while most of a request of a megabyte is still to come."""

    def greet(sock: socket.socket, n: int) -> bool:
        sock.recv(100)
        parts = [
            hostile.event(finish="length" if k == 3 else None, usage=hostile.usage(k, BIG)) for k in (1, 2, 3)
        ]
        sock.sendall(
            hostile.STREAM_HEAD + b"".join(map(hostile.chunk, (*parts, b"data: [DONE]\n\n"))) + b"0\r\n\r\n"
        )
        while sock.recv(1 << 16):
            pass
        return False

    with hostile.serving(hostile.honest, greet=greet) as server:
        return shoot(server.url, folder, 4, n_prompt_tok=BIG)


BIG = 200_000


def refuses_early(folder: Path) -> Shot:
    """413 and a close, with most of the request unread: the kernel then resets the connection."""

    def greet(sock: socket.socket, n: int) -> bool:
        sock.recv(100)
        hostile.plain(sock, b'{"error": "too large"}', "413 Too Large", b"Connection: close\r\n")
        time.sleep(0.1)
        return False

    with hostile.serving(hostile.honest, greet=greet) as server:
        return shoot(server.url, folder, 4, n_prompt_tok=BIG)


def over_ipv6(folder: Path) -> Shot:
    with hostile.serving(hostile.honest, host="::1") as server:
        return shoot(server.url, folder, 6)


NETWORK: dict[str, tuple[Callable[[Path], Shot], int, set[str]]] = {
    "the server restarts in mid-load": (restarted, 200, {"ok", "connect", "reset", "truncated"}),
    "the reply comes before the request is whole": (answers_early, 4, {"ok"}),
    "413 before the request is whole": (refuses_early, 4, {"http_413", "reset"}),
    "the server is at [::1]": (over_ipv6, 6, {"ok"}),
}


@pytest.mark.parametrize("name", NETWORK)
def test_every_request_has_its_outcome(name: str, tmp_path: Path) -> None:
    scenario, n, allowed = NETWORK[name]
    if "::1" in name and not _has_ipv6():
        pytest.skip("no IPv6 here")
    shot = scenario(tmp_path)
    noted(name, f"{n} of {', '.join(sorted(allowed))}", counted(shot.outcomes), shot.time_s)
    assert sum(shot.outcomes.values()) == n
    assert set(shot.outcomes) <= allowed, shot.errors
    if "restarts" in name:
        last = max(shot.records, key=lambda record: record.index)
        assert (last.outcome, shot.records[0].outcome) == ("ok", "ok")


def _has_ipv6() -> bool:
    with contextlib.suppress(OSError), socket.create_server(("::1", 0), family=socket.AF_INET6):
        return True
    return False


@pytest.mark.measures
def test_connections_that_tls_closes_while_they_idle_cost_no_request(
    tls: ssl.SSLContext, tmp_path: Path
) -> None:
    left = iter(range(10))

    def greet(sock: socket.socket, n: int) -> bool:
        """The first ten live for 3 ms: all of them are opened before the first request is due."""
        if next(left, None) is not None:
            time.sleep(0.003)
            sock.unwrap()  # type: ignore[attr-defined]
            return False
        return True

    with hostile.serving(hostile.honest, tls=tls, greet=greet) as server:
        shot = shoot(server.url, tmp_path, 20, every_ms=10)
    seen = f"{counted(shot.outcomes)}, {server.n_connections} connections"
    noted("TLS closes 10 idle connections after 3 ms", "20 ok", seen, shot.time_s)
    assert shot.outcomes == Counter(ok=20), shot.errors


# The shell: whole commands.

ATTACH = ("--engine", "vllm", "--vocab-size", "1000", "--model", "m", "--requests", "20", "--prompt-tokens", "8",
          "--output-tokens", "4")  # fmt: skip
NO_PROXY = "http://127.0.0.1:9"
PAGES: dict[str, dict[bytes, bytes]] = {
    "binary /metrics": {b"/metrics": bytes(range(256)) * 40},
    'max_model_len "x"': {b"/v1/models": b'{"data": [{"id": "m", "max_model_len": "x"}]}'},
    "max_model_len []": {b"/v1/models": b'{"data": [{"id": "m", "max_model_len": []}]}'},
}
VARIABLES: dict[str, dict[str, str]] = {
    "proxy variables": {
        name: NO_PROXY for each in ("http_proxy", "https_proxy", "all_proxy") for name in (each, each.upper())
    },
    "TERM=dumb": {"TERM": "dumb"},
    "LC_ALL=C": {"LC_ALL": "C", "LANG": "C", "PYTHONUTF8": "0", "PYTHONIOENCODING": ""},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", [*PAGES, *VARIABLES])
def test_a_run_is_whole_whatever_lies_around_it(name: str, tmp_path: Path) -> None:
    with hostile.serving(hostile.honest, pages=PAGES.get(name, {})) as server:
        ended = burstline(tmp_path / "out", *ATTACH, "--url", server.url, **VARIABLES.get(name, {}))
    seen = Counter(open_run(ended.run).request_table.column("outcome").to_pylist())
    noted(name, "20 ok", f"exit {ended.code}, {counted(seen)}", ended.time_s)
    assert done(ended.code, ended.out_dir), ended.out
    assert seen == Counter(ok=20)
    assert "Traceback" not in ended.out
    assert not ended.orphans


@pytest.mark.slow
def test_what_a_server_says_is_harmless_in_every_format(tmp_path: Path) -> None:
    words = "=HYPERLINK(1) <script>alert(1)</script> <img src=x onerror=alert(1)> [a](javascript:b)"
    fault = hostile.for_some(hostile.replies({"error": {"message": words}}), 2)
    with hostile.serving(fault, n_honest=1) as server:
        ended = burstline(tmp_path / "out", *ATTACH, "--url", server.url)
    to = tmp_path / "to"
    formats = ("--format", "csv", "--format", "markdown")
    assert verb("report", ended.run, "--to", to, *formats)[0] == 0
    rows = csv.reader(io.StringIO((to / "records.csv").read_text()))
    formulas = [cell for row in rows for cell in row if cell[:1] in ("=", "+", "@")]
    noted("an error that begins with =", "no formula in the CSV", formulas or "none", ended.time_s)
    assert "HYPERLINK" in (to / "records.csv").read_text()
    assert not formulas
    markdown, page = (to / "summary.md").read_text(), (ended.run / "report.html").read_text()
    markup = [tag for tag in ("<script", "<img") if tag in markdown]
    noted("an error with <script> in Markdown", "no markup", markup or "none", ended.time_s)
    assert not markup
    policy = page[: page.index("</head>")]
    own = "Content-Security-Policy" in policy and "default-src 'none'" in policy
    live = [tag for tag in ("<script>alert", "<img src=x") if tag in page]
    noted("an error with <script> in the page", "escaped, and a policy", live or f"escaped, policy: {own}", 0)
    assert own
    assert not live


def shell(line: str, **env: str) -> tuple[int, str, float]:
    """`burstline run` at the truth server within a shell's line, where $RUN stands."""
    load = "--requests 20 --prompt-tokens 8 --output-tokens 4"
    words = f"{sys.executable} -P -m burstline run --engine truth {load}"
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "RUN": words, **env}
    # Root may write anywhere, unless it gives up that right.
    environment["UNPRIVILEGED"] = (
        "setpriv --bounding-set -dac_override,-dac_read_search" if os.geteuid() == 0 else ""
    )
    began_s = time.monotonic()
    ended = subprocess.run(
        ["sh", "-c", line], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
        env=environment, timeout=60, check=False,
    )  # fmt: skip
    return ended.returncode, ended.stdout, time.monotonic() - began_s


SHELLS: dict[str, tuple[str, int, bool]] = {
    "closed stdin": ("$RUN --out $OUT <&-", 0, True),
    "closed stdout": ("$RUN --out $OUT >&-", 0, True),
    "closed stdin, stdout and stderr": ("$RUN --out $OUT <&- >&- 2>&-", 0, True),
    "stdout is a pipe whose reader has gone": ("$RUN --out $OUT | true", 0, True),
    "HOME unset": ("unset HOME XDG_CACHE_HOME; $RUN --out $OUT", 0, True),
    "a HOME that is not there": ("unset XDG_CACHE_HOME; HOME=/nonexistent $RUN --out $OUT", 0, True),
    "900 MiB of addresses": ("ulimit -v 921600; $RUN --out $OUT", 0, True),
    "read-only --out": ("mkdir $OUT; chmod 555 $OUT; $UNPRIVILEGED $RUN --out $OUT", 2, False),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SHELLS)
def test_a_shell_of_any_kind(name: str, tmp_path: Path) -> None:
    line, expected, is_whole = SHELLS[name]
    if "UNPRIVILEGED" in line and os.geteuid() == 0 and shutil.which("setpriv") is None:
        pytest.skip("setpriv is not installed")
    code, said, time_s = shell(line, OUT=str(tmp_path / "out"))
    reports = list((tmp_path / "out").glob("*/report.html"))
    wish = f"exit {expected}, {'a' if is_whole else 'no'} report"
    noted(name, wish, f"exit {code}, {len(reports)} reports", time_s)
    assert code == expected or (expected == 0 and done(code, tmp_path / "out")), said
    assert "Traceback" not in said
    assert bool(reports) == is_whole
    if name == "read-only --out":
        assert "ermission denied" in said
        assert len(said.strip().splitlines()) == 1, said


def test_a_log_line_with_brackets_is_shown_as_it_is_on_a_terminal() -> None:
    """Through the live display, at a pseudo terminal."""
    lines = ["Loading [core.py:45] [/x] [bold]weights[/bold]", "\x1b]0;owned\x07 done"]
    master, slave = pty.openpty()
    began_s = time.monotonic()
    with os.fdopen(slave, "w") as terminal:
        progress = progress_for(quiet=False, stream=terminal)
        for line in lines:
            progress.phase(line)
        progress.close()
        terminal.flush()
        seen = os.read(master, 1 << 16).decode()
    os.close(master)
    noted("[/x] in a log line on a terminal", "as it is", repr(seen[-60:]), time.monotonic() - began_s)
    assert lines[0] in seen
    assert "\x1b]0" not in seen


# A proxy between.

NGINX = shutil.which("nginx", path=f"{os.environ.get('PATH', '')}:/usr/sbin")
KEPT = 'proxy_http_version 1.1; proxy_set_header Connection "";'
PROXIES = {
    "plain": "",
    "keep-alive upstream, no buffering": f"{KEPT} proxy_buffering off;",
    "buffering on": f"{KEPT} proxy_buffering on;",
    "gzip": f"{KEPT} gzip on; gzip_types *; gzip_min_length 1; gzip_proxied any;",
    "HTTP/1.0 upstream": "proxy_http_version 1.0;",
    "keep-alive off": f"{KEPT} keepalive_timeout 0;",
    "small buffers": f"{KEPT} proxy_buffer_size 1k; proxy_buffers 2 1k; proxy_busy_buffers_size 1k;",
    "TLS": f"{KEPT} proxy_buffering off;",
}


@contextlib.contextmanager
def nginx(folder: Path, upstream: str, more: str, tls: Path | None) -> Iterator[str]:
    port = free_port()
    secure = f"ssl_certificate {tls}/cert.pem; ssl_certificate_key {tls}/key.pem;" if tls else ""
    (folder / "nginx.conf").write_text(f"""
        daemon off; pid {folder}/pid; error_log {folder}/error.log; worker_processes 1;
        events {{ }}
        http {{
            access_log off;
            client_body_temp_path {folder}/body; proxy_temp_path {folder}/proxy;
            fastcgi_temp_path {folder}/f; uwsgi_temp_path {folder}/u; scgi_temp_path {folder}/s;
            server {{
                listen 127.0.0.1:{port} {"ssl" if tls else ""}; {secure}
                location / {{ proxy_pass {upstream}; {more} }}
            }}
        }}
    """)
    assert NGINX is not None
    log = folder / "error.log"
    with subprocess.Popen(
        [NGINX, "-c", str(folder / "nginx.conf"), "-p", str(folder), "-e", str(log)]
    ) as running:
        try:
            for _ in range(200):
                with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                    break
                time.sleep(0.02)
            yield f"http{'s' if tls else ''}://127.0.0.1:{port}"
        finally:
            running.terminate()


@pytest.mark.slow
@pytest.mark.skipif(NGINX is None, reason="nginx is not installed")
@pytest.mark.parametrize("name", PROXIES)
def test_behind_nginx_every_request_is_whole(name: str, trusting: Path, tmp_path: Path) -> None:
    tls = trusting if name == "TLS" else None
    with (
        truth_server(Script(ttft_s=0.02, gaps_s=(0.005,))) as truth,
        nginx(tmp_path, truth.url, PROXIES[name], tls) as url,
    ):
        shot = shoot(url, tmp_path / "shot", 60, every_ms=5)
    noted(f"behind nginx: {name}", "60 ok", counted(shot.outcomes), shot.time_s)
    assert shot.outcomes == Counter(ok=60), shot.errors
    assert all(len(record.token_ns) == 3 for record in shot.records)


HAPROXY = shutil.which("haproxy", path=f"{os.environ.get('PATH', '')}:/usr/sbin")


@pytest.mark.measures
@pytest.mark.skipif(HAPROXY is None, reason="haproxy is not installed")
@pytest.mark.parametrize(("option", "codes"), [("", {"held-by-time", "bunched"}), ("http-no-delay", {None})])
def test_text_that_haproxy_holds_is_named(option: str, codes: set[str | None], tmp_path: Path) -> None:
    """It holds text for 200 ms as it comes. Beside other work its end may come too unevenly to know that."""
    assert HAPROXY is not None
    port = free_port()
    with truth_server(Script(ttft_s=0.05, gaps_s=(0.023,))) as truth:
        (tmp_path / "haproxy.cfg").write_text(
            f"defaults\n mode http\n timeout connect 5s\n timeout client 60s\n timeout server 60s\n"
            f"{f' option {option}' if option else ''}\n"
            f"listen all\n bind 127.0.0.1:{port}\n server one {truth.url.removeprefix('http://')}\n"
        )
        with subprocess.Popen([HAPROXY, "-db", "-f", str(tmp_path / "haproxy.cfg")]) as running:
            try:
                for _ in range(200):
                    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                        break
                    time.sleep(0.02)
                shot = shoot(f"http://127.0.0.1:{port}", tmp_path / "shot", 40, every_ms=29, n_output_tok=64)
            finally:
                running.terminate()
    assert shot.outcomes == Counter(ok=40), shot.errors
    reason = gathered(columns_of(record_table(shot.records)))
    noted(f"behind HAProxy {option}", str(codes), str(reason and reason.code), shot.time_s)
    assert (reason and reason.code) in codes


@pytest.mark.measures
@pytest.mark.skipif(NGINX is None, reason="nginx is not installed")
@pytest.mark.parametrize(
    ("more", "n_output_tok", "code"),
    [
        ("proxy_http_version 1.0;", 200, "held-by-size"),
        ("proxy_http_version 1.0;", 10, "bunched"),
        ("proxy_http_version 1.0; proxy_buffering off;", 200, None),
    ],
)
def test_text_that_nginx_gathers_is_named(
    more: str, n_output_tok: int, code: str | None, tmp_path: Path
) -> None:
    """The server ends its reply with the connection, as h11 does for HTTP/1.0."""
    script = Script(ttft_s=0.05, gaps_s=(0.01,), chunked=False)
    with truth_server(script) as truth, nginx(tmp_path, truth.url, more, None) as url:
        shot = shoot(url, tmp_path / "shot", 20, every_ms=5, n_output_tok=n_output_tok)
    assert shot.outcomes == Counter(ok=20), shot.errors
    reason = gathered(columns_of(record_table(shot.records)))
    assert (reason and reason.code) == code


def hold(client: socket.socket, server: socket.socket, beat_s: float) -> None:
    """Pass requests on as they come, and what the server writes at each beat."""

    def up() -> None:
        with contextlib.suppress(OSError):
            while data := client.recv(1 << 16):
                server.sendall(data)
            server.shutdown(socket.SHUT_WR)

    threading.Thread(target=up, daemon=True).start()
    with contextlib.suppress(OSError), client, server:
        while True:
            time.sleep(beat_s - time.monotonic() % beat_s)
            server.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                if not (data := server.recv(1 << 20)):
                    return
                server.setblocking(True)
                client.sendall(data)


@contextlib.contextmanager
def by_beat(upstream: str, beat_s: float) -> Iterator[str]:
    """The URL of a proxy of our own, which forwards text at each beat."""
    host, port = upstream.removeprefix("http://").split(":")

    def serve(listener: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = listener.accept()
                client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                pair = (client, socket.create_connection((host, int(port))), beat_s)
                threading.Thread(target=hold, args=pair, daemon=True).start()

    with socket.create_server(("127.0.0.1", 0), backlog=128) as listener:
        threading.Thread(target=serve, args=(listener,), daemon=True).start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        listener.shutdown(socket.SHUT_RDWR)


@pytest.mark.measures
@pytest.mark.parametrize(
    ("beat_ms", "gap_ms", "code"),
    [(40, 28, "bunched"), (40, 20, "bunched"), (100, 30, "bunched"), (10, 25, None)],
)
def test_text_that_is_held_for_a_beat_is_named(
    beat_ms: float, gap_ms: float, code: str | None, tmp_path: Path
) -> None:
    """Also where fewer than half of the events share a beat; a beat shorter than an event joins none."""
    script = Script(ttft_s=0.05, gaps_s=(gap_ms / 1e3,))
    with truth_server(script) as truth, by_beat(truth.url, beat_ms / 1e3) as url:
        shot = shoot(url, tmp_path / "shot", 20, every_ms=29, n_output_tok=64)
    assert shot.outcomes == Counter(ok=20), shot.errors
    reason = gathered(columns_of(record_table(shot.records)))
    noted(f"a beat of {beat_ms} ms, an event each {gap_ms} ms", str(code), str(reason and reason.code), 0)
    assert (reason and reason.code) == code
