"""A child process that does as its task says."""

import os
import signal
import sys
import time
from multiprocessing.connection import Connection


def main(home: Connection, task: str) -> int | None:
    if task == "raise":
        raise ValueError("no such thing")
    if task == "print and end":
        print("the last words", file=sys.stderr, flush=True)
        return 3
    if task == "be killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if task == "be deaf":
        home.send("deaf")
        time.sleep(600)
    home.send(home.recv())
    return None
