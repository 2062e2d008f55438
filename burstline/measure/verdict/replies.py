"""What an audit says of a run's replies, and when it is a warning."""

from __future__ import annotations

from burstline.measure.record.summary import Audit, SecondReader
from burstline.measure.record.verdict import Reason, Replies
from burstline.measure.stats.estimates import Absent, Estimate


def audit_sentence(audit: Audit) -> str:
    """What an audit found, for the page and the terminal."""
    second = audit.second_reader
    return " ".join([_difference_sentence(audit), *([reader_sentence(second)] if second else [])])


def _difference_sentence(audit: Audit) -> str:
    load, alone, excess = audit.under_load, audit.alone, audit.excess
    if isinstance(load, Absent) or isinstance(alone, Absent) or isinstance(excess, Absent):
        return (
            "The replies were not audited: the run ended before, or no audited request succeeded each time."
        )
    n = load.n
    if audit.answer == Replies.SAME:
        all_of = f"all of {n:,} replies are" if n > 1 else "the one reply is"
        return f"Audit: {all_of} the same as alone (95% CI of what differs: {_interval(load)})."
    more = "more" if audit.answer == Replies.MORE else "not significantly more"
    return (
        f"Audit: {round(load.point * n):,} of {n:,} replies differ from the same request sent alone, and "
        f"{round(alone.point * n):,} when it is sent alone again: {more} under load "
        f"(95% CI of the difference: {_interval(excess)})."
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
    if audit is None or (second := audit.second_reader) is None or not second.differ:
        return ()
    advice = "Do not use numbers that count tokens. Report this with the folder audit/ of the run."
    return (Reason("misread", reader_sentence(second), advice),)


def replies_differ(audit: Audit | None) -> tuple[Reason, ...]:
    """A warning where more replies differ under load than alone, which need not be a fault."""
    if audit is None or audit.answer != Replies.MORE:
        return ()
    advice = (
        "Either results of the engine's kernels depend on the batch, or this is a fault. Audit again with "
        "batch-invariant kernels, if it has them: what differs then is a fault."
    )
    return (Reason("replies-differ", "The server gave other replies under load than alone.", advice),)


def _interval(share: Estimate) -> str:
    low, high = (100 * (share.point if end is None else end) for end in (share.low, share.high))
    return f"[{low:.2g}%, {high:.2g}%]"
