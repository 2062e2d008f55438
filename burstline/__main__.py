"""`python -m burstline` is the command `burstline`."""

import signal
import sys

# Until the command handles it (`terminable`) nothing is at stake: it ends us, and meets no half-done import.
signal.signal(signal.SIGINT, signal.SIG_DFL)

from burstline.cli import main  # noqa: E402

if __name__ == "__main__":
    sys.exit(main())
