"""An audit: replies of a load, compared with those to the same requests sent alone, and what it says."""

from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Final

import numpy as np

from burstline.measure.record.decode import Reading
from burstline.measure.record.summary import Audit, SecondReader
from burstline.measure.record.verdict import Reason, Replies
from burstline.measure.stats.estimates import Absent, Estimate, measured, paired_excess, share_of

Tokens = Sequence[int] | str
"""A reply: token ids, or its text where the server sends no ids."""
TIMES: Final = 4
LEAST_LOOP: Final = 16
"""A reply ends in a loop where its last part is one sequence, 4 times over or more: of 16 ids at least, or of
64 characters."""


def audit(replies: Sequence[tuple[Tokens, Tokens, Tokens]]) -> Audit:
    """`replies` are those to one request each: under load, alone, and alone again."""
    if not replies:
        return Audit.absent(Absent("no audited request succeeded each time", "nothing-audited"))
    n, unit = len(replies), "characters" if isinstance(replies[0][0], str) else "tokens"
    parts_at = [first_difference(loaded, alone) for loaded, alone, _ in replies]
    places = [place for place in parts_at if place is not None]
    differs = np.array([place is not None for place in parts_at])
    differs_alone = np.array([first_difference(alone, again) is not None for _, alone, again in replies])
    n_differ, n_alone = int(differs.sum()), int(differs_alone.sum())
    excess = paired_excess(n, n_differ, n_alone, int((differs & differs_alone).sum()))
    answer = Replies.MORE if excess.low is not None and excess.low > 0 else Replies.AS_ALONE
    cut = [place == len(loaded) for place, (loaded, _, _) in zip(parts_at, replies, strict=True)]
    return Audit(
        answer=answer if n_differ + n_alone else Replies.SAME,
        under_load=share_of(n_differ, n),
        alone=share_of(n_alone, n),
        excess=excess,
        first_difference_p50=measured(float(np.median(places)), unit, "", len(places)) if places else None,
        cut_short=share_of(sum(cut), n),
        loops=share_of(sum(ends_in_loop(loaded) for loaded, _, _ in replies), n),
        loops_alone=share_of(sum(ends_in_loop(alone) for _, alone, _ in replies), n),
    )


def compared(client: str, theirs: Sequence[Reading], ours: Mapping[int, Reading]) -> SecondReader:
    """Each reply as another client read it, and our own reading of the same bytes."""
    read = [each for each in theirs if each.error is None]
    differ = tuple(_difference(each, ours.get(each.index)) for each in read if each != ours.get(each.index))
    unread = tuple(f"request {each.index:,}: {each.error}" for each in theirs if each.error is not None)
    return SecondReader(client, len(read), differ, unread)


def _difference(theirs: Reading, ours: Reading | None) -> str:
    """`request 7: finish reason 'stop', Burstline 'length'`."""
    if ours is None:
        return f"request {theirs.index:,}: Burstline could not read it"
    facts = (
        ("token count", theirs.n_tok, ours.n_tok),
        ("finish reason", theirs.finish_reason, ours.finish_reason),
        ("reply", theirs.generated, ours.generated),
    )
    what, one, other = next(fact for fact in facts if fact[1] != fact[2])
    return f"request {theirs.index:,}: {what} {one!r:.40}, Burstline {other!r:.40}"


def first_difference(one: Tokens, other: Tokens) -> int | None:
    """How many tokens or characters two replies have in common; None where they are the same."""
    return next((k for k, (a, b) in enumerate(zip_longest(one, other)) if a != b), None)


def ends_in_loop(reply: Tokens) -> bool:
    """Whether its last part is one sequence, several times over."""
    least = LEAST_LOOP * (4 if isinstance(reply, str) else 1)
    for period in range(1, len(reply) // TIMES + 1):
        tail = reply[-max(TIMES * period, least) :]
        if len(reply) >= least and tail[period:] == tail[:-period]:
            return True
    return False


def audit_sentence(audit: Audit) -> str:
    reader = f" {reader_sentence(audit.second_reader)}" if audit.second_reader else ""
    load, alone, excess = audit.under_load, audit.alone, audit.excess
    if isinstance(load, Absent) or isinstance(alone, Absent) or isinstance(excess, Absent):
        return (
            "The replies were not audited: the run ended before, or no audited request succeeded each time."
            f"{reader}"
        )
    n = load.n
    if audit.answer == Replies.SAME:
        all_of = f"all of {n:,} replies are" if n > 1 else "the one reply is"
        return f"Audit: {all_of} the same as alone (95% CI of what differs: {_interval(load)}).{reader}"
    more = "more" if audit.answer == Replies.MORE else "not significantly more"
    return (
        f"Audit: {round(load.point * n):,} of {n:,} replies differ from the same request sent alone, and "
        f"{round(alone.point * n):,} when it is sent alone again: {more} under load "
        f"(95% CI of the difference: {_interval(excess)}).{reader}"
    )


def reader_sentence(second: SecondReader) -> str:
    """How another client read the replies that were sent alone."""
    who, n = second.client, f"{second.n:,} {'reply' if second.n == 1 else 'replies'}"
    told = f"{who} read the same text, token count and finish reason as Burstline in {n}."
    if second.differ:
        told = f"{who} and Burstline read {len(second.differ):,} of {n} differently ({second.differ[0]})."
    if second.unread:
        told += f" {who} could not read {len(second.unread):,} more ({second.unread[0]})."
    return told


def misread(audit: Audit | None) -> tuple[Reason, ...]:
    """A reason not to believe a run: another client reads its replies otherwise."""
    second = audit.second_reader if audit else None
    if second is None or not second.differ:
        return ()
    return (Reason.of("misread", what=reader_sentence(second)),)


def replies_differ(audit: Audit | None) -> tuple[Reason, ...]:
    """A warning where more replies differ under load than alone, which need not be a fault."""
    if audit is None or audit.answer != Replies.MORE:
        return ()
    return (Reason.of("replies-differ"),)


def _interval(share: Estimate) -> str:
    low, high = (100 * (share.point if end is None else end) for end in (share.low, share.high))
    return f"[{low:.2g}%, {high:.2g}%]"
