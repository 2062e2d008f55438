"""A process that behaves like an engine, or badly. Run as a script: `fake_server.py HOW [ARGUMENT]`."""

import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

METRICS = Path(__file__).parents[2] / "golden" / "vllm" / "metrics.prom"


class Handler(BaseHTTPRequestHandler):
    completion: tuple[int, dict[str, object]] = (
        200,
        {
            "choices": [{"index": 0, "text": "x", "finish_reason": "length"}],
            "usage": {"prompt_tokens": 3, "completion_tokens": 1},
        },
    )

    def answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self) -> None:
        if self.path == "/metrics":
            self.answer(200, METRICS.read_bytes())
        else:
            self.answer(200, b'"ok"')

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        status, value = self.completion
        self.answer(status, json.dumps(value).encode())


def serves(port: str) -> None:
    time.sleep(0.3)
    HTTPServer(("127.0.0.1", int(port)), Handler).serve_forever()


def refuses(port: str) -> None:
    Handler.completion = (404, {"error": {"message": "The model `m` does not exist."}})
    serves(port)


def generates_nothing(port: str) -> None:
    Handler.completion = (200, {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 0}})
    serves(port)


def dies() -> None:
    print("(Worker pid=7) ERROR 11-21 02:08:33 [executor.py:953] RuntimeError: no weights at all", flush=True)
    print("RuntimeError: Engine core initialization failed. See root cause above.", flush=True)
    sys.exit(3)


def sleeps() -> None:
    print("loading ...", flush=True)
    time.sleep(600)


def stubborn() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sleeps()


def family(folder: str) -> None:
    """A child in a session of its own and an orphaned grandchild, both deaf to SIGTERM, as it is not."""
    python, deaf = sys.executable, "from fake_server import stubborn; stubborn()"
    orphans = f"import subprocess as s; print(s.Popen([{python!r}, '-c', {deaf!r}], stdout=2).pid)"
    own_session: dict[str, bool | Path] = {"start_new_session": True, "cwd": Path(__file__).parent}
    child = subprocess.Popen([python, "-c", deaf], **own_session)
    done = subprocess.run([python, "-c", orphans], stdout=subprocess.PIPE, text=True, **own_session)
    pids = f"{os.getpid()} {child.pid} {done.stdout}"
    Path(folder, "pids.partial").write_text(pids)
    Path(folder, "pids.partial").rename(Path(folder, "pids"))
    sleeps()


def headless(port: str, folder: str) -> None:
    """A child that looks dead: its main thread has ended, another holds the port. For Linux."""
    python, half_dead = sys.executable, f"from fake_server import half_dead; half_dead({port}, {folder!r})"
    child = subprocess.Popen([python, "-c", half_dead], cwd=Path(__file__).parent)
    Path(folder, "pids.partial").write_text(f"{os.getpid()} {child.pid}")
    sleeps()


def half_dead(port: int, folder: str) -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", port))
        holder.listen()
        threading.Thread(target=time.sleep, args=(600,)).start()
        Path(folder, "pids.partial").rename(Path(folder, "pids"))
        libc = ctypes.CDLL(None)
        libc.syscall(60 if os.uname().machine == "x86_64" else 93, 0)  # exit: this thread's alone


def tells(path: str) -> None:
    """Its environment."""
    Path(path).write_text(json.dumps(dict(os.environ)))


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
