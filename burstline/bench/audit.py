"""An audit of a run's replies: after the load some of its requests are sent again, alone, and twice."""

from __future__ import annotations

from array import array
from dataclasses import replace
from importlib.metadata import version

from burstline.bench.fire import STARTING_LIMIT_S
from burstline.bench.server_session import Say, Site
from burstline.bench.stages import job_at, send_apart
from burstline.console.server_options import ServerOptions
from burstline.loadgen.capture.capture import read_captures
from burstline.loadgen.capture.files import write_json
from burstline.loadgen.driver.job import Job
from burstline.measure.record.decode import Reading, Readings
from burstline.measure.record.run_writer import AUDIT, READINGS, RunDir
from burstline.measure.record.typed_json import to_json
from burstline.servers.host.child import Child, ChildLostError
from burstline.workloads.load import Load
from burstline.workloads.plan import Plan
from burstline.workloads.prompts import Vocabulary, rng
from burstline.workloads.request import WorkloadError


def check_audit(where: ServerOptions) -> None:
    """WorkloadError, before anything starts, where this server's replies could not be compared."""
    if len(where.urls) > 1:
        raise WorkloadError("--audit compares the replies of one server: give one --url")
    for name in ("temperature", "do_sample", "top_p", "top_k"):
        if f'"{name}"' in (where.extra_body or ""):
            raise WorkloadError(
                f"--audit compares greedy replies: {name} in --extra-body sets the sampling; drop one of them"
            )


def n_audited(load: Load, n: int) -> int:
    return min(n, max(1, round((load.spec.audit or 0.0) * n)))


def audit_load(run: RunDir, site: Site, load: Load, plan: Plan, vocabulary: Vocabulary, say: Say) -> None:
    """Send some of the requests that were answered, one at a time; their captures are kept in the run."""
    answered = [capture.index for capture in read_captures(run.captures) if capture.failure is None]
    if load.has_sessions:  # a later turn needs the replies before it
        answered = [k for k in answered if (turn := plan.requests[k].turn) is None or not turn.after]
    n = n_audited(load, len(answered))
    chosen = sorted(rng(load.spec.seed, "audit").permutation(answered)[:n].tolist())
    say(f"Auditing {n:,} {'reply' if n == 1 else 'replies'}: {2 * n:,} requests, one at a time")
    requests, at_once = tuple(plan.requests[k] for k in chosen), array("q", [0] * n)
    job = job_at(run, site, load, plan, vocabulary)
    alone = replace(job, requests=requests, due_ns=at_once, concurrency=1, hang_ups={})
    first, second = (replace(alone, captures=run.path / folder) for folder in AUDIT)
    send_apart(first)
    client = site.engine.own_client if site.engine.speaks == "native" else "httpx"
    if client is None:
        send_apart(second)
    else:
        _read_again(run, second, client, say)


def _read_again(run: RunDir, job: Job, client: str, say: Say) -> None:
    """Send the requests once more, by this client; what it makes of the replies is kept with the run."""
    replies: list[Reading] = []
    with Child("burstline.bench.second_reader", f"the second reader ({client})") as child:
        child.send((client, job))
        try:
            while (reading := child.receive(STARTING_LIMIT_S + (job.deadline_s or 0.0))) is not None:
                replies.append(reading)
        except ChildLostError as error:
            say(f"{error}; the audit has the {len(replies):,} replies before that")
    write_json(run.path / READINGS, to_json(Readings(f"{client} {version(client)}", tuple(replies))))
