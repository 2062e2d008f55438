"""Prints the table of the fault lab after its tests (fault, expected, seen, time); a certificate for TLS."""

import ssl
import subprocess
from collections.abc import Iterator
from dataclasses import astuple
from pathlib import Path
from typing import Any

import pytest

from burstline.servers.destination import trusted
from tests.faults.lab import TABLE, Row


@pytest.fixture(scope="session")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tls")
    command = (
        "openssl req -x509 -newkey rsa:2048 -nodes -keyout key.pem -out cert.pem -days 2 -subj /CN=127.0.0.1"
    )
    names = ["-addext", "subjectAltName=IP:127.0.0.1"]
    subprocess.run([*command.split(), *names], cwd=folder, check=True, capture_output=True)
    return folder


@pytest.fixture
def trusting(certificate: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The certificate's folder; clients of this test trust it, also where one of this process trusted others."""
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate / "cert.pem"))
    trusted.cache_clear()
    yield certificate
    trusted.cache_clear()


@pytest.fixture
def tls(trusting: Path) -> ssl.SSLContext:
    """A server's side of TLS by a certificate that clients of this test trust."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(trusting / "cert.pem", trusting / "key.pem")
    return context


def pytest_sessionfinish(session: pytest.Session) -> None:
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["fault_lab"] = [astuple(row) for row in TABLE]


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    TABLE.extend(Row(*row) for row in node.workeroutput.get("fault_lab", ()))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if not TABLE:
        return
    terminalreporter.section("fault lab")
    rows = [(row.fault, row.expected, row.seen, f"{row.time_s:.1f}") for row in TABLE]
    cells = [("fault", "expected", "seen", "s"), *rows]
    widths = [min(max(map(len, column)), 100) for column in zip(*cells, strict=True)]
    for row in cells:
        line = " | ".join(cell[:w].ljust(w) for cell, w in zip(row, widths, strict=True))
        terminalreporter.write_line(line.rstrip())
