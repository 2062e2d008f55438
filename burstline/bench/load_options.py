"""The load that a person asked for, checked before anything is started."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np

from burstline.bench.wish import Wish, check_flags, of_sessions
from loadgen.driver.job import Job, most_open, n_drivers
from servers.engine import Identity
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
    from workloads.data.data_sets import Materials
    from workloads.works import Work

N_REQUESTS: Final = 1000
MAX_REPEATS: Final = 1000
CANCEL_AFTER: Final = Lengths(8, 8)


@dataclass(frozen=True, slots=True)
class Load:
    """A checked wish. `concurrency` makes it a closed loop, where `arrivals` only says how many.

    In a load of sessions, `arrivals` and `concurrency` are those of sessions. The clients of a share
    `cancel_share` of the requests hang up after `cancel_after` tokens.
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
        return f"{pattern}-{self.arrivals.n}x{self.work.name}"

    @property
    def title(self) -> str:
        """E.g. `1,000 requests of 512 → 64 tokens, all at once`."""
        n, what = self.arrivals.n, self.work.title
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


def checked(wish: Wish) -> Load:
    """The load; WorkloadError, naming the flag, where the wish cannot be fulfilled."""
    check_flags(wish)
    closed = wish.concurrency is not None
    work, n_most, times_s = _work(wish)
    pattern = wish.arrival or ("constant" if wish.rate and not closed else "burst")
    if times_s is not None and not closed and wish.arrival in (None, "replay"):
        pattern = "replay"
    elif wish.arrival != "replay":
        times_s = None
    if wish.arrival_times:
        times_s = _times_in(wish.arrival_times)
    has_count = wish.requests is not None or times_s or wish.steps or wish.duration_s
    wanted = arrivals.asked(
        pattern,
        n=wish.sessions or wish.requests if has_count or wish.sessions else n_most or N_REQUESTS,
        duration_s=wish.duration_s,
        rate_per_s=wish.rate,
        burstiness=wish.burstiness,
        ramp_to_per_s=wish.ramp_to,
        steps=arrivals.parse_steps(wish.steps) if wish.steps else None,
        times_s=times_s,
    )
    if n_most is not None and wanted.n > n_most:
        source = wish.data or wish.trace
        raise WorkloadError(f"--requests {wanted.n}: {source} has {n_most} that can be used; lower it")
    due_s = wanted.due_s(rng(wish.seed, "arrivals"))
    load = Load(
        work=work,
        arrivals=wanted,
        concurrency=wish.concurrency,
        max_rate_per_s=wish.max_rate,
        n_workers=n_drivers(wish.workers, due_s, wish.concurrency),
        seed=wish.seed,
        salt=wish.salt,
        deadline_s=wish.deadline_s,
        warm_up=parse_warm_up(wish.warmup, handover=wish.warmup_handover),
        sampling=_sampling(wish),
        cancel_share=wish.cancel_share or 0.0,
        cancel_after=_cancel_after(wish, work.shape),
    )
    if wish.warmup_handover and load.has_sessions:
        raise WorkloadError("--warmup-handover is for single requests, and this load has sessions: drop it")
    return load


def _cancel_after(wish: Wish, shape: Shape) -> Lengths:
    """After how many tokens clients hang up; WorkloadError where none ever would."""
    after = CANCEL_AFTER if wish.cancel_after is None else parse_lengths(wish.cancel_after, "--cancel-after")
    if wish.cancel_share and after.low >= shape.output_tok.high:
        raise WorkloadError(
            f"--cancel-after {after}: replies have {shape.output_tok} tokens, so no client would hang up; "
            "give fewer tokens"
        )
    return after


def _work(wish: Wish) -> tuple[Work, int | None, tuple[float, ...] | None]:
    """What the load consists of, how many requests (or sessions) it has at most, and its own times."""
    from workloads import works

    kind = RequestKind(wish.request_kind)
    output_tok = parse_lengths(wish.output_tokens, "--output-tokens")
    if wish.trace is not None:
        trace = _trace(wish)
        speed = wish.trace_speed or 1.0
        return works.Recorded(trace, speed), len(trace), tuple((trace.at_s / speed).tolist())
    prompt_tok = parse_lengths(wish.prompt_tokens, "--prompt-tokens")
    if wish.data is not None:
        return _written(wish, kind, output_tok)
    if of_sessions(wish):
        session = _session_shape(wish, prompt_tok, output_tok)
        return works.Sessions(session), None, None
    sharing = None
    if wish.shared_prefix is not None or wish.prefix_hit is not None:
        sharing = Sharing(wish.groups or 1, wish.shared_prefix, wish.prefix_hit)
    shape = Shape(prompt_tok, output_tok, sampling=_sampling(wish), kind=kind, sharing=sharing)
    return works.Synthetic(shape), None, None


def _sampling(wish: Wish) -> Sampling:
    temperature, top_p = wish.temperature or 0.0, wish.top_p
    if not 0 <= temperature <= 10:
        raise WorkloadError(f"--temperature {temperature:g}: expected 0 (greedy) or more, up to 10")
    if top_p is not None and not 0 < top_p <= 1:
        raise WorkloadError(f"--top-p {top_p:g}: expected a share above 0, at most 1")
    if top_p is not None and not temperature:
        raise WorkloadError(f"--top-p {top_p:g} would be ignored: greedy decoding draws nothing")
    return Sampling(temperature, 1.0 if top_p is None else top_p, wish.seed)


def _trace(wish: Wish):  # type: ignore[no-untyped-def]
    from workloads.data.traces import read_trace

    assert wish.trace is not None
    trace = read_trace(wish.trace)
    begin_s, end_s = 0.0, float("inf")
    if wish.trace_window is not None:
        begin, dots, end = wish.trace_window.partition("..")
        try:
            begin_s, end_s = float(begin), float(end)
        except ValueError:
            dots = ""
        if not dots or not 0 <= begin_s < end_s:
            raise WorkloadError(f"--trace-window {wish.trace_window}: expected seconds, e.g. 600..1200")
    return trace.window(begin_s, end_s, wish.requests)


def _written(
    wish: Wish, kind: RequestKind, output_tok: Lengths
) -> tuple[Work, int, tuple[float, ...] | None]:
    from workloads import works
    from workloads.data.data_sets import arrival_times, read_data

    assert wish.data is not None
    data = read_data(wish.data, wish.data_column, wish.data_filter, wish.data_split)
    n_wanted = wish.sessions or wish.requests
    if of_sessions(wish) or any(item.session is not None for item in data.items):
        session = _session_shape(wish, Lengths(1, 1), output_tok)
        n = len({item.session if item.session is not None else item.row for item in data.items})
        return works.Sessions(session, data, data.items, n_wanted), n, None
    timed = wish.arrival == "replay" and not wish.arrival_times
    items = data.sampled(wish.seed, "file" if timed or wish.data_order == "file" else "shuffle")
    times_s = None
    if timed:
        items = tuple(sorted(items, key=lambda item: item.at_s or 0.0))
        times_s = arrival_times(items)
        if times_s is None:
            raise WorkloadError(
                f"--arrival replay: not every row of {wish.data} has a timestamp; give --arrival-times FILE"
            )
    return works.Written(data, items, n_wanted, output_tok, kind, timed), len(items), times_s


def _session_shape(wish: Wish, prompt_tok: Lengths, output_tok: Lengths):  # type: ignore[no-untyped-def]
    from workloads.sessions import SessionShape

    return SessionShape(
        turns=parse_lengths(wish.turns or "4", "--turns"),
        prompt_tok=prompt_tok,
        turn_tok=parse_lengths(wish.turn_tokens or "64", "--turn-tokens"),
        output_tok=output_tok,
        think_ms=parse_seconds(wish.think_s or "0", "--think-s"),
        tool_ms=parse_seconds(wish.tool_s, "--tool-s") if wish.tool_s else None,
        tool_share=wish.tool_share or 0.0,
        fan_out=wish.fan_out or 1,
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
        hang_ups=load.hang_ups(plan) if load.cancel_share else {},
        secrets=known_secrets(),
        **rest,  # type: ignore[arg-type]
    )
