"""A child process that does as its task says."""

import os
import signal
import socket
import struct
import sys
import threading
import time
from multiprocessing.connection import Connection

from burstline.servers.redact import known_secrets


def main(home: Connection, task: str) -> int | None:
    if task == "raise":
        raise ValueError("no such thing")
    if task == "raise what cannot be pickled":
        error = ValueError("no such lock")
        error.add_note = threading.Lock()  # type: ignore[method-assign, assignment]
        raise error
    if task == "print and end":
        print("the last words", file=sys.stderr, flush=True)
        return 3
    if task == "be killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if task == "say half":
        os.write(home.fileno(), struct.pack("!i", 100) + b"half")
        time.sleep(600)
    if task == "hang up":
        with socket.socket(fileno=os.dup(home.fileno())) as ours:
            ours.shutdown(socket.SHUT_RDWR)
        time.sleep(600)
    if task == "talk":
        print("\n".join(["many words"] * 1000 + ["the last words"]), flush=True)
        return 3
    if task == "tell":
        home.send(known_secrets())
    if task == "be deaf":
        home.send("deaf")
        time.sleep(600)
    home.send(home.recv())
    return None
