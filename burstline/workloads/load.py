"""A load: what follows from its options, parsed and checked once, and its plan once the server is known.

LoadSpec --load_of--> Load --Load.plan, with what is known of the Server--> Plan
"""

import math
import secrets
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from burstline.wording import counted
from burstline.workloads import arrivals, works
from burstline.workloads import plan as plans
from burstline.workloads.arrivals import ARRIVALS, parse_arrival
from burstline.workloads.data_sets import NO_SERVER, Server, read_data
from burstline.workloads.due_times import due_times, most_open
from burstline.workloads.lengths import Lengths, draw_both, parse_lengths, parse_seconds
from burstline.workloads.prompts import rng
from burstline.workloads.request import RequestKind, Sampling, WorkloadError
from burstline.workloads.rows import lines
from burstline.workloads.spec import MOST_DEADLINE_S, DataSource, LoadSpec, check_spec
from burstline.workloads.text_prompts import as_chat, as_text
from burstline.workloads.traces import read_trace
from burstline.workloads.works import Sessions, SessionShape, Synthetic, Work, Written

N_REQUESTS: Final = 1000
MAX_REPEATS: Final = 1000


@dataclass(frozen=True, slots=True)
class Load:
    """What follows from a checked spec: its work, how many requests arrive when, how tokens are chosen.

    With `spec.concurrency` it is a closed loop, where `arrivals` only says how many; one that goes by time
    has more of them than it will need. In a load of sessions, both are those of sessions. `hang_up_tok` is
    after how many tokens of a reply clients disconnect.
    """

    spec: LoadSpec
    work: Work
    arrivals: arrivals.Arrivals
    sampling: Sampling
    hang_up_tok: Lengths | None = None

    @property
    def until_s(self) -> float | None:
        """After how many seconds a closed loop that goes by time starts no more requests."""
        return None if self.spec.concurrency is None else self.spec.duration_s

    @property
    def shape(self) -> plans.Shape:
        return self.work.shape

    @property
    def has_sessions(self) -> bool:
        return isinstance(self.work, Sessions)

    @property
    def needs_text(self) -> bool:
        """Whether a tokenizer must count the prompts."""
        return isinstance(self.work, Written | Sessions) and self.work.data is not None

    @property
    def is_all_chats(self) -> bool:
        """Whether a chat server can be sent every row as it is, so that no tokenizer need be known."""
        rows = self.work.items if isinstance(self.work, Written | Sessions) else ()
        return bool(rows) and all(row.messages for row in rows) and not self.spec.warmup

    @property
    def name(self) -> str:
        pattern = f"closed{self.spec.concurrency}" if self.spec.concurrency else self.arrivals.pattern
        if self.until_s is not None:
            return f"{pattern}-{self.until_s:g}sx{self.work.name}"
        return f"{pattern}-{self.arrivals.n}x{self.work.name}"

    @property
    def title(self) -> str:
        return self.title_for(self.arrivals.n)

    def title_for(self, n: int) -> str:
        """E.g. `1,000 requests of 512 → 64 tokens, all at once`; sessions are counted instead of `n`."""
        n, what = self.arrivals.n if self.has_sessions else n, self.work.title
        if self.until_s is not None:
            return f"requests of {what}, concurrency {self.spec.concurrency} for {self.until_s:g} s"
        many = f"{n:,}" if self.has_sessions else f"{counted(n, 'request')} of"
        rate = f" at {self.arrivals.rate_per_s:g} req/s" if self.arrivals.rate_per_s else ""
        if self.arrivals.pattern == "ramp":
            first, last = self.arrivals.arrival.parameter
            rate = f" from {first:g} to {last:g} req/s"
        pattern = ARRIVALS[self.arrivals.pattern].title + rate
        users = self.spec.concurrency
        return f"{many} {what}, {f'concurrency {users}' if users else pattern}"

    @property
    def n_connections(self) -> int:
        """How many connections the load surely needs at one moment; an open loop may come to need more."""
        return most_open(due_times(self.arrivals, rng(self.spec.seed, "arrivals")), self.spec.concurrency)

    @property
    def n_at_once(self) -> int:
        """How many requests may be in flight at one moment."""
        return min(self.spec.concurrency or self.arrivals.n, self.arrivals.n)

    @property
    def longest_tok(self) -> int | None:
        """The tokens of the longest request, prompt and answer together.

        None where requests that are too long are left out, or are known only once their text is counted.
        """
        if isinstance(self.work, Sessions) and self.work.data is None:
            return self.work.session.longest_tok
        if not isinstance(self.work, Synthetic):
            return None
        prompt_tok, output_tok = draw_both(
            self.shape.prompt_tok, self.shape.output_tok, self.arrivals.n, self.spec.seed
        )
        return int((prompt_tok + output_tok).max())

    def plan(self, server: Server = NO_SERVER) -> plans.Plan:
        """The plan for a server.

        Where texts can neither be counted nor sent as chats, as to a server that never came up, they become
        random prompts of about such lengths.
        """
        is_unknown = server.tokenizer is None and not server.speaks_chat
        work = Synthetic(self.shape) if self.needs_text and is_unknown else self.work
        plan = work.plan(self.arrivals, server, self.spec.seed)
        if self.sampling != work.shape.sampling:
            plan = plans.asking(plan, sampling=self.sampling)
        if self.spec.warmup:
            plan = plans.with_warm_up(plan, self.spec.warmup, server.vocabulary)
        if self.spec.ends == "natural" or not server.forces_length:
            free = plans.asking(plan, ignore_eos=False)  # the same work, of which no reply is too short
            plan = replace(free, sha256=plan.sha256, contents_sha256=free.sha256)
        if server.words is not None:
            plan = as_text(plan, server.words, self.spec.salt, server.n_extra_tok)
        return as_chat(plan) if self.has_sessions and server.speaks_chat else plan

    def expected_cached(self, plan: plans.Plan, server: Server) -> float | None:
        """The share of prompt tokens that an unlimited cache could serve; None where replies decide it."""
        if self.has_sessions or self.shape.kind is not RequestKind.GENERATE:
            return None
        primed = next((stage.requests for stage in plan.stages if stage.name == plans.PRIMING), ())
        salt, block_tok = self.spec.salt, server.block_tok
        return plans.expected_hit_fraction(plan.requests, salt, block_tok, primed, server.tokenizer)

    def hang_ups(self, plan: plans.Plan) -> dict[int, int]:
        """After how many tokens which requests are abandoned, by index; drawn from the seed alone.

        One that asks for no more tokens than its client waits for ends by itself and is not among them.
        """
        if self.spec.cancel_share is None or self.hang_up_tok is None:
            return {}
        n = len(plan.requests)
        draws = rng(self.spec.seed, "hang-ups")
        chosen = np.sort(draws.permutation(n)[: round(self.spec.cancel_share.share * n)])
        after_tok = self.hang_up_tok.draw(len(chosen), draws)
        ends_early = after_tok < plan.output_tok[chosen]
        return dict(zip(chosen[ends_early].tolist(), after_tok[ends_early].tolist(), strict=True))


def load_of(spec: LoadSpec) -> Load:
    """The load that the options say, with a salt; WorkloadError, naming the flag, if it cannot be."""
    check_spec(spec)
    sampling = _sampling(spec)
    work, n_most, times_s = _work(spec, sampling)
    hang_up_tok = None
    if spec.cancel_share is not None:
        hang_up_tok = parse_lengths(spec.cancel_share.after, "--cancel-share after")
        if hang_up_tok.low >= work.shape.output_tok.high:
            raise WorkloadError(
                f"--cancel-share after={hang_up_tok}: replies have {work.shape.output_tok} tokens, so no "
                "client would disconnect; use fewer tokens"
            )
    salted = replace(spec, salt=spec.salt or secrets.token_hex(8))
    load = Load(salted, work, _arrivals(spec, work, n_most, times_s), sampling, hang_up_tok)
    _check_arrivals(load)
    return load


def _check_arrivals(load: Load) -> None:
    """WorkloadError if a request is due too late or shorter than its prefix, or a driver would be idle."""
    spec, n = load.spec, load.arrivals.n
    last_s = due_times(load.arrivals, rng(spec.seed, "arrivals")).max(initial=0.0)
    if last_s > arrivals.MOST_S:
        is_replay = load.arrivals.times_s is not None
        advice = "are the recorded times in seconds?" if is_replay else "raise the rate"
        raise WorkloadError(
            f"the last request would be due after {last_s:g} s; expected at most {arrivals.MOST_S:g}: "
            f"{advice}"
        )
    if spec.shared_prefix is not None:
        shape = load.shape
        plans.check_shared(spec.shared_prefix, draw_both(shape.prompt_tok, shape.output_tok, n, spec.seed)[0])
    if spec.workers == "auto":
        return
    if spec.concurrency is not None and spec.workers > spec.concurrency:
        raise WorkloadError(
            f"--concurrency {spec.concurrency}: expected at least {spec.workers}, one for each load driver "
            "(--workers, or one for each --url)"
        )
    if spec.workers > n:
        what = counted(n, "conversation" if spec.of_sessions else "request")
        raise WorkloadError(
            f"{spec.workers} load drivers for {what}: expected at most one for each; lower --workers, or "
            "name fewer servers with --url"
        )


def _arrivals(
    spec: LoadSpec, work: Work, n_most: int | None, times_s: tuple[float, ...] | None
) -> arrivals.Arrivals:
    """How many requests arrive, and when: `n_most` are there, whose own times are `times_s`."""
    closed, arrival = spec.concurrency is not None, spec.arrival
    if arrival is None:
        has_times = times_s is not None and not closed
        paced = "constant" if spec.rate and not closed else "burst"
        arrival = parse_arrival("replay" if has_times else paced)
    if arrival.pattern != "replay":
        times_s = None
    elif arrival.file:
        times_s = arrivals.parse_times(lines(arrival.file, "--arrival"))
    has_count = bool(spec.requests or times_s) or arrival.pattern == "steps" or spec.duration_s is not None
    if spec.concurrency is not None and spec.duration_s is not None:
        n_most, has_count = n_most or _n_enough(spec.concurrency, spec.duration_s, work.shape), False
    wanted = arrivals.asked(
        arrival,
        n=spec.sessions or spec.requests if has_count or spec.sessions else n_most or N_REQUESTS,
        duration_s=None if closed else spec.duration_s,
        rate_per_s=spec.rate,
        times_s=times_s,
    )
    if n_most is not None and wanted.n > n_most:
        source = spec.data.name if spec.data else spec.trace.file if spec.trace else ""
        raise WorkloadError(f"--requests {wanted.n}: {source} has {n_most} that can be used; lower it")
    return wanted


LEAST_S, LEAST_S_PER_TOK, SHORT = 0.02, 0.002, 2_000
"""No server is taken to answer sooner than this, and this for each token; SHORT plans: than a quarter."""


def _n_enough(concurrency: int, duration_s: float, shape: plans.Shape) -> int:
    """More requests than a closed loop can send in its time; one that runs out of them says so."""
    if not 0 < duration_s <= MOST_DEADLINE_S:
        raise WorkloadError(f"--duration-s {duration_s:g}: expected seconds above 0, at most a week")
    stay_s = LEAST_S + LEAST_S_PER_TOK * (shape.output_tok.low + shape.output_tok.high) / 2
    n, most = (math.ceil(concurrency * (1 + duration_s / s)) for s in (stay_s, stay_s / 4))
    return min(max(n, min(most, SHORT)), arrivals.MAX_REQUESTS)


def _work(spec: LoadSpec, sampling: Sampling) -> tuple[Work, int | None, tuple[float, ...] | None]:
    """What the load consists of, how many requests (or sessions) it has at most, and its own times."""
    output_tok = parse_lengths(spec.output_tokens, "--output-tokens")
    if spec.trace is not None:
        whole = read_trace(spec.trace.file)
        trace = whole.window(spec.trace.begin_s, spec.trace.end_s, spec.requests)
        times_s = tuple((trace.at_s / spec.trace.speed).tolist())
        return works.Recorded(trace, spec.trace.speed), len(trace), times_s
    prompt_tok = parse_lengths(spec.prompt_tokens, "--prompt-tokens")
    if spec.data is not None:
        return _written(spec, spec.data, output_tok)
    if spec.of_sessions:
        return works.Sessions(_session_shape(spec, prompt_tok, output_tok)), None, None
    kind, shared = spec.request_kind, spec.shared_prefix
    shape = plans.Shape(prompt_tok, output_tok, sampling=sampling, kind=kind, sharing=shared)
    return works.Synthetic(shape), None, None


def _sampling(spec: LoadSpec) -> Sampling:
    """How the next token is chosen; WorkloadError where that makes no sense."""
    temperature, top_p = spec.temperature or 0.0, spec.top_p
    if not 0 <= temperature <= 10:
        raise WorkloadError(f"--temperature {temperature:g}: expected 0 (greedy) or more, up to 10")
    if top_p is not None and not 0 < top_p <= 1:
        raise WorkloadError(f"--top-p {top_p:g}: expected a share above 0, at most 1")
    if top_p is not None and not temperature:
        raise WorkloadError(f"--top-p {top_p:g} would be ignored: greedy decoding does not sample")
    return Sampling(temperature, 1.0 if top_p is None else top_p, spec.seed)


def _written(
    spec: LoadSpec, source: DataSource, output_tok: Lengths
) -> tuple[Work, int, tuple[float, ...] | None]:
    data = read_data(source.name, source.columns, source.split)
    n_wanted = spec.sessions or spec.requests
    if spec.of_sessions or any(item.session is not None for item in data.items):
        session = _session_shape(spec, Lengths(1, 1), output_tok)
        n = len({item.session if item.session is not None else item.row for item in data.items})
        return works.Sessions(session, data, data.sampled(spec.seed), n_wanted), n, None
    timed = spec.arrival is not None and spec.arrival.pattern == "replay" and not spec.arrival.file
    items = data.items if timed else data.sampled(spec.seed)
    times_s = None
    if timed:
        at_s = sorted(item.at_s for item in items if item.at_s is not None)
        if len(at_s) < len(items):
            raise WorkloadError(
                f"--arrival replay: not every row of {source.name} has a timestamp; give --arrival file:FILE"
            )
        items = tuple(sorted(items, key=lambda item: item.at_s or 0.0))
        times_s = tuple(each - at_s[0] for each in at_s)
    return works.Written(data, items, n_wanted, output_tok, spec.request_kind, timed), len(items), times_s


def _session_shape(spec: LoadSpec, prompt_tok: Lengths, output_tok: Lengths) -> SessionShape:
    return SessionShape(
        turns=parse_lengths(spec.turns or "4", "--turns"),
        prompt_tok=prompt_tok,
        turn_tok=parse_lengths(spec.turn_tokens or "64", "--turn-tokens"),
        output_tok=output_tok,
        think_ms=parse_seconds(spec.think_s or "0", "--think-s"),
    )
