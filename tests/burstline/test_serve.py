"""`burstline serve`: an engine by itself."""

import re
import signal
import subprocess
import sys
from urllib.parse import urlsplit
from urllib.request import urlopen

import pytest

from burstline.console import exit_codes
from burstline.servers.host.process import require_free_port


@pytest.mark.slow
def test_it_prints_the_url_of_an_engine_that_answers_and_an_interrupt_stops_the_engine() -> None:
    command = [sys.executable, "-m", "burstline", "serve", "reference"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as served:
        assert served.stdout is not None
        told = next(line for line in served.stdout if "serves" in line)
        url = re.search(r"http://[\d.:]+", told)[0]
        with urlopen(f"{url}/v1/models", timeout=30) as reply:
            assert b"reference" in reply.read()
        served.send_signal(signal.SIGINT)
        assert served.wait(30) == exit_codes.INTERRUPTED
    require_free_port("127.0.0.1", urlsplit(url).port)
