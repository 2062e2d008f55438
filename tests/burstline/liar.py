"""A small load generator that lies as told: `python liar.py URL N N_TOKENS OUT honest|adds|drops|late`.

It sends N completions at once, a thread each, and writes what it says it measured, in ms, to OUT/liar.json.
"""

import json
import statistics
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection, HTTPException
from pathlib import Path


def timed(url: str, n_tokens: str, wait_s: float) -> tuple[float, float] | None:
    """TTFT and E2E of one request, s; None where it failed."""
    time.sleep(wait_s)
    body = {"model": "truth", "prompt": [1] * 8, "max_tokens": int(n_tokens), "stream": True}
    connection = HTTPConnection(url.removeprefix("http://"))
    begin = time.monotonic()
    try:
        connection.request("POST", "/v1/completions", json.dumps(body))
        reply = connection.getresponse()
        at = [time.monotonic() for line in reply if b'"text"' in line]
    except (OSError, HTTPException):
        return None
    return (at[0] - begin, at[-1] - begin) if reply.status == 200 else None


def main() -> None:
    url, n, n_tokens, out, lie = sys.argv[1:]
    with ThreadPoolExecutor(int(n)) as pool:
        waits_s = [0.04 * k if lie == "late" else 0.0 for k in range(int(n))]
        done = list(pool.map(lambda wait_s: timed(url, n_tokens, wait_s), waits_s))
    good = [each for each in done if each]
    more_s = 0.02 if lie == "adds" else 0.0
    said = {
        "counts": [len(good), 0 if lie == "drops" else len(done) - len(good)],
        "ttft": {"median": 1e3 * (statistics.median(ttft for ttft, _ in good) + more_s)},
        "e2e_s": statistics.median(e2e for _, e2e in good),
    }
    Path(out, "liar.json").write_text(json.dumps(said))


main()
