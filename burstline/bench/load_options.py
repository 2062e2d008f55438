"""The load that a person asked for, checked before anything is started."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from burstline.bench.workers import Workers, n_drivers
from loadgen.driver.job import Job
from servers.engine import Identity
from workloads import arrivals
from workloads.lengths import parse_lengths
from workloads.plan import Plan, Shape, make_plan
from workloads.prompts import Vocabulary
from workloads.request import WorkloadError
from workloads.seeds import rng

N_REQUESTS = 1000


@dataclass(frozen=True, slots=True)
class Wish:
    """The load's flags as they were typed; None where a flag was not given."""

    requests: int | None = None
    prompt_tokens: str = "512"
    output_tokens: str = "64"
    arrival: str | None = None
    rate: float | None = None
    burstiness: float | None = None
    ramp_to: float | None = None
    steps: str | None = None
    arrival_times: Path | None = None
    duration_s: float | None = None
    concurrency: int | None = None
    max_rate: float | None = None
    workers: Workers = 1
    seed: int = 0
    salt: str = "0"
    deadline_s: float = 600.0


@dataclass(frozen=True, slots=True)
class Load:
    """A checked wish. `concurrency` makes it a closed loop, where `arrivals` only says how many."""

    shape: Shape
    arrivals: arrivals.Arrivals
    concurrency: int | None
    max_rate_per_s: float | None
    n_workers: int
    seed: int
    salt: str
    deadline_s: float

    @property
    def name(self) -> str:
        pattern = f"closed{self.concurrency}" if self.concurrency else self.arrivals.pattern
        return f"{pattern}-{self.arrivals.n}x{self.shape.prompt_tok}-{self.shape.output_tok}"

    @property
    def title(self) -> str:
        """E.g. `1,000 requests of 512 → 64 tokens, all at once`."""
        many = "1 request" if self.arrivals.n == 1 else f"{self.arrivals.n:,} requests"
        lengths = f"{many} of {self.shape.prompt_tok} → {self.shape.output_tok} tokens"
        rate = f" at {self.arrivals.rate_per_s:g}/s" if self.arrivals.rate_per_s else ""
        pattern = "all at once" if self.arrivals.pattern == "burst" else self.arrivals.pattern + rate
        return f"{lengths}, {f'{self.concurrency} at a time' if self.concurrency else pattern}"

    @property
    def n_at_once(self) -> int:
        """How many connections the load may need at one moment."""
        return min(self.concurrency or self.arrivals.n, self.arrivals.n)

    @property
    def longest_tok(self) -> int:
        """The tokens of the longest request, prompt and answer together."""
        return self.shape.prompt_tok.high + self.shape.output_tok.high

    def plan(self, vocabulary: Vocabulary) -> Plan:
        return make_plan(
            self.shape, self.arrivals.due_s(rng(self.seed, "arrivals")).tolist(), vocabulary, self.seed
        )

    def check_fits(self, identity: Identity) -> None:
        """WorkloadError where the longest request is beyond the server's limit."""
        longest = self.longest_tok
        limit = identity.max_model_len
        if limit is not None and longest > limit:
            raise WorkloadError(
                f"--prompt-tokens {self.shape.prompt_tok} and --output-tokens {self.shape.output_tok} make "
                f"{longest} tokens, but the model's limit is {limit}; ask for fewer, or raise its limit"
            )


def checked(wish: Wish) -> Load:
    """The load; WorkloadError, naming the flag, where the wish cannot be fulfilled."""
    _check_numbers(wish)
    closed = wish.concurrency is not None
    if closed and wish.arrival not in (None, "burst"):
        raise WorkloadError(
            f"--concurrency {wish.concurrency} makes a closed loop: a request is due when another ends; "
            f"--arrival {wish.arrival} would be ignored; give one or the other"
        )
    if closed and wish.rate is not None:
        raise WorkloadError(
            f"--concurrency {wish.concurrency} makes a closed loop: a request is due when another ends; "
            f"--rate {wish.rate:g} would be ignored; give one or the other, or limit the loop by --max-rate"
        )
    pattern = wish.arrival or ("constant" if wish.rate and not closed else "burst")
    has_count = wish.requests is not None or wish.arrival_times or wish.steps or wish.duration_s
    wanted = arrivals.asked(
        pattern,
        n=wish.requests if has_count else N_REQUESTS,
        duration_s=wish.duration_s,
        rate_per_s=wish.rate,
        burstiness=wish.burstiness,
        ramp_to_per_s=wish.ramp_to,
        steps=arrivals.parse_steps(wish.steps) if wish.steps else None,
        times_s=_times_in(wish.arrival_times) if wish.arrival_times else None,
    )
    return Load(
        shape=Shape(
            parse_lengths(wish.prompt_tokens, "--prompt-tokens"),
            parse_lengths(wish.output_tokens, "--output-tokens"),
        ),
        arrivals=wanted,
        concurrency=wish.concurrency,
        max_rate_per_s=wish.max_rate,
        n_workers=n_drivers(wish.workers, wanted.due_s(rng(wish.seed, "arrivals")), wish.concurrency),
        seed=wish.seed,
        salt=wish.salt,
        deadline_s=wish.deadline_s,
    )


def _check_numbers(wish: Wish) -> None:
    at_least_one = (
        ("--requests", wish.requests),
        ("--concurrency", wish.concurrency),
        ("--workers", None if wish.workers == "auto" else wish.workers),
    )
    for flag, number in at_least_one:
        if number is not None and number < 1:
            raise WorkloadError(f"{flag} {number}: expected at least 1")
    if not wish.deadline_s > 0:
        raise WorkloadError(f"--deadline-s {wish.deadline_s}: expected seconds above 0")
    if wish.max_rate is not None and wish.concurrency is None:
        raise WorkloadError("--max-rate is a ceiling for closed loops: give --concurrency too, or use --rate")
    if wish.max_rate is not None and not wish.max_rate > 0:
        raise WorkloadError(f"--max-rate {wish.max_rate}: expected requests per second above 0")
    if not wish.salt or any(c not in "0123456789abcdefABCDEF" for c in wish.salt):
        raise WorkloadError(f"--salt {wish.salt!r}: expected hexadecimal digits, e.g. --salt 5eed")


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
        **rest,  # type: ignore[arg-type]
    )
