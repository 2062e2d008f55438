"""Put before a command's import path: every Python process of it says what it has imported.

At SIGUSR1 and when it ends, a process writes `<role>-<pid>-<moment>.json` into BURSTLINE_MODULES_TO: the
names in `sys.modules` and its memory. Its role is the module that it runs, or "forked".
"""

import atexit
import os
import signal
import sys

FOLDER = os.environ.get("BURSTLINE_MODULES_TO")
ROLES = {
    "burstline": "main",
    "burstline.bench.second_reader": "second reader",
    "burstline.loadgen.driver.drive": "driver",
    "burstline.loadgen.driver.canary": "canary",
    "burstline.measure.record.decode": "decoder",
    "burstline.servers.host.watch": "watcher",
    "burstline.servers.host.keeper": "keeper",
}


STARTED_AS = os.getpid()


def role() -> str:
    if os.getpid() != STARTED_AS:
        return "forked"
    return next((ROLES[word] for word in sys.orig_argv if word in ROLES), "other")


def write(moment: str) -> None:
    """Nothing is imported for it: that would be seen."""
    with open("/proc/self/smaps_rollup") as file:  # noqa: PTH123
        pss_kb = next(int(line.split()[1]) for line in file if line.startswith("Pss:"))
    names = ",".join(f'"{name}"' for name in list(sys.modules))
    with open(f"{FOLDER}/{role()}-{os.getpid()}-{moment}.json", "w") as file:  # noqa: PTH123
        file.write(f'{{"pss_kb": {pss_kb}, "modules": [{names}]}}')


if FOLDER:
    _exit = os._exit

    def exit_at_once(code: int) -> None:
        write("exit")
        _exit(code)

    os._exit = exit_at_once
    signal.signal(signal.SIGUSR1, lambda *_: write("load"))
    atexit.register(write, "exit")
