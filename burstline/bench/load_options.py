"""The load that a person asked for, checked before anything is started."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np

from burstline.bench.load_spec import MOST_DEADLINE_S, LoadSpec, check_flags, of_sessions
from loadgen.driver.job import Job, most_open, n_drivers
from servers.identity import Identity
from servers.redact import known_secrets
from workloads import arrivals
from workloads.lengths import Lengths, draw_both, parse_lengths, parse_seconds
from workloads.plan import Plan, Shape, with_sampling
from workloads.prefixes import BLOCK_TOK, Sharing
from workloads.prompts import Vocabulary
from workloads.request import GREEDY, RequestKind, Sampling, WorkloadError
from workloads.seeds import rng
from workloads.warm_up import WarmUp, parse_warm_up, with_warm_up

if TYPE_CHECKING:
    from workloads.data_sets import Materials
    from workloads.works import Work

N_REQUESTS: Final = 1000
MAX_REPEATS: Final = 1000
CANCEL_AFTER: Final = Lengths(8, 8)


@dataclass(frozen=True, slots=True)
class Load:
    """A checked spec. `concurrency` makes it a closed loop, where `arrivals` only says how many.

    In a load of sessions, `arrivals` and `concurrency` are those of sessions. The clients of a share
    `cancel_share` of the requests hang up after `cancel_after` tokens. A closed loop that goes by time starts
    no request after `until_s` seconds, and `arrivals` has more than it will need.
    """

    work: Work
    arrivals: arrivals.Arrivals
    concurrency: int | None
    max_rate_per_s: float | None
    n_workers: int
    seed: int
    salt: str
    deadline_s: float
    warm_up: WarmUp | None = None
    sampling: Sampling = GREEDY
    cancel_share: float = 0.0
    cancel_after: Lengths = CANCEL_AFTER
    until_s: float | None = None

    @property
    def shape(self) -> Shape:
        return self.work.shape

    @property
    def has_sessions(self) -> bool:
        from workloads.works import Sessions

        return isinstance(self.work, Sessions)

    @property
    def name(self) -> str:
        pattern = f"closed{self.concurrency}" if self.concurrency else self.arrivals.pattern
        if self.until_s is not None:
            return f"{pattern}-{self.until_s:g}sx{self.work.name}"
        return f"{pattern}-{self.arrivals.n}x{self.work.name}"

    @property
    def title(self) -> str:
        """E.g. `1,000 requests of 512 → 64 tokens, all at once`."""
        n, what = self.arrivals.n, self.work.title
        if self.until_s is not None:
            return f"requests of {what}, {self.concurrency} at a time for {self.until_s:g} s"
        many = f"{n:,}" if self.has_sessions else f"{n:,} request{'s' * (n != 1)} of"
        rate = f" at {self.arrivals.rate_per_s:g}/s" if self.arrivals.rate_per_s else ""
        names = {"burst": "all at once", "replay": "at recorded times"}
        pattern = names.get(self.arrivals.pattern, self.arrivals.pattern) + rate
        return f"{many} {what}, {f'{self.concurrency} at a time' if self.concurrency else pattern}"

    @property
    def n_connections(self) -> int:
        """How many connections the load surely needs at one moment; an open loop may come to need more."""
        return most_open(self.arrivals.due_s(rng(self.seed, "arrivals")), self.concurrency)

    @property
    def n_at_once(self) -> int:
        """How many requests may be in flight at one moment."""
        return min(self.concurrency or self.arrivals.n, self.arrivals.n)

    @property
    def longest_tok(self) -> int | None:
        """The tokens of the longest request, prompt and answer together.

        None where requests that are too long are left out, or are known only once their text is counted.
        """
        from workloads.works import Sessions, Synthetic

        if isinstance(self.work, Sessions) and self.work.data is None:
            return self.work.session.longest_tok
        if not isinstance(self.work, Synthetic):
            return None
        prompt_tok, output_tok = draw_both(
            self.shape.prompt_tok, self.shape.output_tok, self.arrivals.n, self.seed
        )
        return int((prompt_tok + output_tok).max())

    def plan(
        self,
        vocabulary: Vocabulary,
        materials: Materials | None = None,
        identity: Identity | None = None,
    ) -> Plan:
        """The plan for a server; `materials` where text must be counted.

        Without them, as for a server that never came up, it has as many requests of about such lengths.
        """
        from workloads.works import Server, Synthetic

        limit, block_tok = (identity.max_model_len, identity.kv_block_tok) if identity else (None, None)
        server = Server(vocabulary, materials, block_tok or BLOCK_TOK, limit)
        work = Synthetic(self.shape) if self.work.needs_text and materials is None else self.work
        plan = work.plan(self.arrivals, server, self.seed)
        if self.sampling != work.shape.sampling:
            plan = with_sampling(plan, self.sampling)
        return plan if self.warm_up is None else with_warm_up(plan, self.warm_up, vocabulary)

    def hang_ups(self, plan: Plan) -> dict[int, int]:
        """After how many tokens which requests are abandoned, by index; drawn from the seed alone.

        One that asks for no more tokens than its client waits for ends by itself and is not among them.
        """
        n = len(plan.requests)
        draws = rng(self.seed, "hang-ups")
        chosen = np.sort(draws.permutation(n)[: round(self.cancel_share * n)])
        after_tok = self.cancel_after.draw(len(chosen), draws)
        ends_early = after_tok < plan.output_tok[chosen]
        return dict(zip(chosen[ends_early].tolist(), after_tok[ends_early].tolist(), strict=True))


def checked(spec: LoadSpec) -> Load:
    """The load; WorkloadError, naming the flag, where the spec cannot be fulfilled."""
    check_flags(spec)
    closed = spec.concurrency is not None
    work, n_most, times_s = _work(spec)
    pattern = spec.arrival or ("constant" if spec.rate and not closed else "burst")
    if times_s is not None and not closed and spec.arrival in (None, "replay"):
        pattern = "replay"
    elif spec.arrival != "replay":
        times_s = None
    if spec.arrival_times:
        times_s = _times_in(spec.arrival_times)
    until_s = spec.duration_s if closed else None
    has_count = spec.requests is not None or times_s or spec.steps or spec.duration_s
    if until_s is not None:
        n_most = n_most or _n_enough(spec, work.shape)
        has_count = None
    wanted = arrivals.asked(
        pattern,
        n=spec.sessions or spec.requests if has_count or spec.sessions else n_most or N_REQUESTS,
        duration_s=None if closed else spec.duration_s,
        rate_per_s=spec.rate,
        burstiness=spec.burstiness,
        ramp_to_per_s=spec.ramp_to,
        steps=arrivals.parse_steps(spec.steps) if spec.steps else None,
        times_s=times_s,
    )
    if n_most is not None and wanted.n > n_most:
        source = spec.data or spec.trace
        raise WorkloadError(f"--requests {wanted.n}: {source} has {n_most} that can be used; lower it")
    due_s = wanted.due_s(rng(spec.seed, "arrivals"))
    if due_s.max(initial=0.0) > arrivals.MOST_S:
        raise WorkloadError(
            f"the last request would be due after {due_s.max():g} s; expected at most {arrivals.MOST_S:g}: "
            "are the recorded times in seconds?"
        )
    n_workers = n_drivers(spec.workers, due_s, spec.concurrency)
    if spec.concurrency is not None and n_workers > spec.concurrency:
        raise WorkloadError(
            f"--concurrency {spec.concurrency}: expected at least {n_workers}, one for each load driver "
            "(--workers, or one for each --url)"
        )
    return Load(
        work=work,
        arrivals=wanted,
        concurrency=spec.concurrency,
        max_rate_per_s=spec.max_rate,
        n_workers=n_workers,
        seed=spec.seed,
        salt=spec.salt,
        deadline_s=spec.deadline_s,
        warm_up=parse_warm_up(spec.warmup),
        sampling=_sampling(spec),
        cancel_share=spec.cancel_share or 0.0,
        cancel_after=_cancel_after(spec, work.shape),
        until_s=until_s,
    )


LEAST_S, LEAST_S_PER_TOK = 0.02, 0.002
"""No server is taken to answer a request sooner than this, and this for each token."""


def _n_enough(spec: LoadSpec, shape: Shape) -> int:
    """More requests than a closed loop can send in its time; one that runs out of them says so."""
    assert spec.duration_s is not None
    assert spec.concurrency is not None
    if not 0 < spec.duration_s <= MOST_DEADLINE_S:
        raise WorkloadError(f"--duration-s {spec.duration_s:g}: expected seconds above 0, at most a week")
    stay_s = LEAST_S + LEAST_S_PER_TOK * (shape.output_tok.low + shape.output_tok.high) / 2
    n = math.ceil(spec.concurrency * (1 + spec.duration_s / stay_s))
    return min(n, arrivals.MAX_REQUESTS)


def _cancel_after(spec: LoadSpec, shape: Shape) -> Lengths:
    """After how many tokens clients hang up; WorkloadError where none ever would."""
    after = CANCEL_AFTER if spec.cancel_after is None else parse_lengths(spec.cancel_after, "--cancel-after")
    if spec.cancel_share and after.low >= shape.output_tok.high:
        raise WorkloadError(
            f"--cancel-after {after}: replies have {shape.output_tok} tokens, so no client would hang up; "
            "give fewer tokens"
        )
    return after


def _work(spec: LoadSpec) -> tuple[Work, int | None, tuple[float, ...] | None]:
    """What the load consists of, how many requests (or sessions) it has at most, and its own times."""
    from workloads import works

    kind = RequestKind(spec.request_kind)
    output_tok = parse_lengths(spec.output_tokens, "--output-tokens")
    if spec.trace is not None:
        trace = _trace(spec)
        speed = spec.trace_speed or 1.0
        return works.Recorded(trace, speed), len(trace), tuple((trace.at_s / speed).tolist())
    prompt_tok = parse_lengths(spec.prompt_tokens, "--prompt-tokens")
    if spec.data is not None:
        return _written(spec, kind, output_tok)
    if of_sessions(spec):
        session = _session_shape(spec, prompt_tok, output_tok)
        return works.Sessions(session), None, None
    sharing = None
    if spec.shared_prefix is not None or spec.prefix_hit is not None:
        sharing = Sharing(spec.groups or 1, spec.shared_prefix, spec.prefix_hit)
    shape = Shape(prompt_tok, output_tok, sampling=_sampling(spec), kind=kind, sharing=sharing)
    return works.Synthetic(shape), None, None


def _sampling(spec: LoadSpec) -> Sampling:
    temperature, top_p = spec.temperature or 0.0, spec.top_p
    if not 0 <= temperature <= 10:
        raise WorkloadError(f"--temperature {temperature:g}: expected 0 (greedy) or more, up to 10")
    if top_p is not None and not 0 < top_p <= 1:
        raise WorkloadError(f"--top-p {top_p:g}: expected a share above 0, at most 1")
    if top_p is not None and not temperature:
        raise WorkloadError(f"--top-p {top_p:g} would be ignored: greedy decoding draws nothing")
    return Sampling(temperature, 1.0 if top_p is None else top_p, spec.seed)


def _trace(spec: LoadSpec):  # type: ignore[no-untyped-def]
    from workloads.traces import read_trace

    assert spec.trace is not None
    trace = read_trace(spec.trace)
    begin_s, end_s = 0.0, float("inf")
    if spec.trace_window is not None:
        begin, dots, end = spec.trace_window.partition("..")
        try:
            begin_s, end_s = float(begin), float(end)
        except ValueError:
            dots = ""
        if not dots or not 0 <= begin_s < end_s:
            raise WorkloadError(f"--trace-window {spec.trace_window}: expected seconds, e.g. 600..1200")
    return trace.window(begin_s, end_s, spec.requests)


def _written(
    spec: LoadSpec, kind: RequestKind, output_tok: Lengths
) -> tuple[Work, int, tuple[float, ...] | None]:
    from workloads import works
    from workloads.data_sets import arrival_times, read_data

    assert spec.data is not None
    data = read_data(spec.data, spec.data_column, spec.data_split)
    n_wanted = spec.sessions or spec.requests
    if of_sessions(spec) or any(item.session is not None for item in data.items):
        session = _session_shape(spec, Lengths(1, 1), output_tok)
        n = len({item.session if item.session is not None else item.row for item in data.items})
        items = data.sampled(spec.seed)
        return works.Sessions(session, data, items, n_wanted), n, None
    timed = spec.arrival == "replay" and not spec.arrival_times
    items = data.items if timed else data.sampled(spec.seed)
    times_s = None
    if timed:
        items = tuple(sorted(items, key=lambda item: item.at_s or 0.0))
        times_s = arrival_times(items)
        if times_s is None:
            raise WorkloadError(
                f"--arrival replay: not every row of {spec.data} has a timestamp; give --arrival-times FILE"
            )
    return works.Written(data, items, n_wanted, output_tok, kind, timed), len(items), times_s


def _session_shape(spec: LoadSpec, prompt_tok: Lengths, output_tok: Lengths):  # type: ignore[no-untyped-def]
    from workloads.sessions import SessionShape

    return SessionShape(
        turns=parse_lengths(spec.turns or "4", "--turns"),
        prompt_tok=prompt_tok,
        turn_tok=parse_lengths(spec.turn_tokens or "64", "--turn-tokens"),
        output_tok=output_tok,
        think_ms=parse_seconds(spec.think_s or "0", "--think-s"),
    )


def _times_in(path: Path) -> tuple[float, ...]:
    try:
        return arrivals.parse_times(path.read_text())
    except (OSError, UnicodeDecodeError) as error:
        raise WorkloadError(f"--arrival-times {path} cannot be read: {error}") from None


def job_of(plan: Plan, load: Load, **rest: object) -> Job:
    """What the drivers have to do with the plan; `rest` says where and into which files."""
    return Job(
        requests=plan.requests,
        due_ns=plan.due_ns,
        salt=load.salt,
        deadline_s=load.deadline_s,
        concurrency=load.concurrency,
        max_rate_per_s=load.max_rate_per_s,
        until_s=load.until_s,
        hang_ups=load.hang_ups(plan) if load.cancel_share else {},
        secrets=known_secrets(),
        **rest,  # type: ignore[arg-type]
    )
