"""`python -m burstline.cluster.driver SOCKET`: one load driver, for the actor that started it."""

import os
import signal
import sys
from multiprocessing.connection import Client

from loadgen.driver.drive import run


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    key = bytes.fromhex(os.environ.pop("BURSTLINE_DRIVER_KEY"))
    # The socket ends with the actor, however it ends, and then the driver stops by itself.
    with Client(sys.argv[1], authkey=key) as conn:
        run(conn.recv(), conn)


if __name__ == "__main__":
    main()
