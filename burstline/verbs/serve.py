"""`burstline serve`: an engine by itself, until it is interrupted."""

import argparse
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from burstline.bench.server_session import check_start, check_where, choose_engine, serving
from burstline.console.server_options import server_of
from burstline.servers.host.interrupt import terminable
from burstline.servers.launch import LaunchOptions
from burstline.servers.messages import EngineError
from burstline.servers.truth import STATEMENT
from burstline.workloads.request import WorkloadError


def run(args: argparse.Namespace) -> int:
    if (args.name is None) == (args.engine is None):
        raise WorkloadError("expected one engine, such as `burstline serve reference`")
    where = replace(server_of(args), engine=args.name or args.engine, host=args.host)
    check_where(where)
    engine = choose_engine(where)
    if {"-h", "--help"} & {*args.engine_args}:  # of the engine, which prints it and ends
        options = LaunchOptions("", where.host, 0, "", Path(), where.engine_python, args.engine_args)
        return subprocess.run(engine.launch(options).argv, check=False).returncode
    check_start(engine, where, longest_tok=0)
    with terminable(), TemporaryDirectory(prefix="burstline-serve-") as scratch:
        try:
            with serving(engine, where, Path(scratch), print) as site:
                at = f"serves {site.target.model} at {site.target.url}; press Ctrl-C to stop it"
                print(f"{engine.title} {at}", flush=True)
                assert site.server is not None
                while site.server.alive():
                    time.sleep(0.5)
                cause = engine.root_cause(site.server.log()) or site.server.last_line()
        finally:
            with suppress(FileNotFoundError), (Path(scratch) / "server.log").open(errors="replace") as log:
                sys.stdout.writelines(line for line in log if line.startswith(STATEMENT))
        raise EngineError(f"{engine.title} ended with exit code {site.server.exit_code}: {cause}")
