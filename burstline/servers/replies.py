"""Decodes replies: the parts that are the same for all engines' dialects.

An adapter gives a function that reads one JSON value into a tally; whole replies, streams, errors, what is
cut off and what makes no sense are the same for all.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from itertools import accumulate
from typing import Any, Final

import orjson

from burstline.servers.messages import WITH_TOKENS, Event, HttpReply, Kind, Reply
from burstline.servers.redact import words_of_server

DONE = b"[DONE]"
_LINE_END = re.compile(rb"\r\n|\n|\r")
_TITLE = re.compile(rb"<title>(.*?)</title>", re.IGNORECASE | re.DOTALL)


@dataclass(slots=True, eq=False)
class Tally(Reply):
    """A reply while its events come.

    `counting` is True where differences of the running total count the tokens of an event, None until known;
    `early` is what a role counted, `silent` holds the events that have tokens by it alone. `uncounted` holds
    the choices of each event whose tokens the server did not count; `is_all_text`: their texts are the whole
    reply. `foreign` says what the first event was that is none of the dialect's.
    """

    events: list[Event] = field(default_factory=list)
    foreign: str | None = None
    counting: bool | None = None
    early: int = 0
    silent: list[Event] = field(default_factory=list)
    uncounted: list[Mapping[str, Any]] = field(default_factory=list)
    is_all_text: bool = True

    def grow(self, n_output: int, n_prompt: int) -> int:
        """Take over the server's totals so far; how many tokens are new."""
        before, self.n_output_usage, self.n_prompt_tok = self.n_output_usage or 0, n_output, n_prompt
        return n_output - before

    def reply(self) -> Reply:
        """The reply; a count of no tokens where there is text, or of a prompt, is no count."""
        if self.n_output_usage == 0 and any(event.kind in WITH_TOKENS for event in self.events):
            self.n_output_usage = None
        self.n_prompt_tok = self.n_prompt_tok or None
        if all(event.kind is Kind.UNKNOWN for event in self.events):
            self.error = self.error or self.foreign
        counted = self.n_output_ids is not None or self.n_output_usage is not None
        self.text = None if counted or not self.is_all_text else text_of(self.uncounted)
        return Reply(**{each.name: getattr(self, each.name) for each in fields(Reply)})


def text_of(choices: Sequence[Mapping[str, Any]]) -> str | None:
    """The text of these choices, to be tokenized again; None where there is none."""
    texts: list[Any] = []
    for choice in choices:
        part = choice.get("delta") or choice.get("message") or choice
        if isinstance(part, dict):
            known = [next(filter(None, map(part.get, names)), None) for names in (REASONING, ANSWER)]
            texts += known if any(known) or part is choice else [part]
    return "".join(map(words_in, texts)) or None


ANSWER: Final = ("content", "text", "refusal")
REASONING: Final = ("reasoning_content", "reasoning", "thinking", "reasoning_details")
"""Where the text of a delta stands, the first that has any: some servers say it twice."""
_ADMINISTRATIVE: Final = frozenset(
    "role id name type object index format model provider status signature data".split()  # noqa: SIM905
)


def words_in(value: object) -> str:
    """Every string in a JSON value that is not known to be administrative."""
    if isinstance(value, dict):
        return "".join(words_in(each) for name, each in value.items() if name not in _ADMINISTRATIVE)
    if isinstance(value, list):
        return "".join(map(words_in, value))
    return value if isinstance(value, str) else ""


Take = Callable[[Tally, Any, int], Event]
"""Reads one JSON value that ends at an offset; raises what plain look-ups raise where it is none of its."""


def decode_reply(reply: HttpReply, take: Take) -> Reply:
    """The decoded reply, streamed or plain; never raises."""
    if not reply.ok:
        return refusal(reply)
    if not reply.body:
        return Reply([])
    return decode_stream(reply.body, take) if is_stream(reply) else decode_plain(reply.body, take)


def decode_stream(body: bytes, take: Take) -> Reply:
    """A stream of events; `[DONE]` terminates it, what follows that is not looked at."""
    tally = Tally()
    payloads, ends = server_sent_events(body)
    if DONE in payloads:
        tally.terminated = True
        del payloads[payloads.index(DONE) :]
    answers = loads_all(payloads)
    if answers and isinstance(answers[-1], bytes) and not body.endswith(b"\n"):
        answers.pop()  # cut off in the middle: the wire knows that the reply is not whole
    for answer, end in zip(answers, ends, strict=False):
        tally.events.append(_taken(tally, take, answer, end))
    return tally.reply()


def decode_plain(body: bytes, take: Take) -> Reply:
    """One JSON value for the whole reply; all of it came at once, and so did its tokens."""
    tally = Tally()
    event = _taken(tally, take, loads(body), len(body))
    if event.kind in WITH_TOKENS and event.n_tok is None:
        event.n_tok = tally.n_output_usage
    tally.events.append(event)
    tally.terminated = event.kind not in (Kind.ERROR, Kind.UNKNOWN)
    return tally.reply()


def _taken(tally: Tally, take: Take, answer: Any, end: int) -> Event:
    """What `take` makes of it. What is no event of the dialect voids no reply, unless it is broken JSON."""
    problem = None
    try:
        if "error" not in answer or error_message(answer) is None:
            return take(tally, answer, end)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError):
        problem = f"not a reply of this engine: {answer!r:.300}"
        if not _is_broken(answer) and error_message(answer) is None:
            tally.foreign = tally.foreign or problem
            return Event(end, Kind.UNKNOWN, None)
    tally.error = tally.error or error_message(answer) or problem
    tally.overloaded = tally.overloaded or is_overload(answer)
    return Event(end, Kind.ERROR, None)


def _is_broken(answer: object) -> bool:
    """Whether it was to be JSON: other words are heartbeats."""
    return isinstance(answer, bytes) and answer.startswith((b"{", b"["))


def error_message(answer: object) -> str | None:
    """The server's own words out of any of the error shapes; None where the JSON value is no error."""
    if not isinstance(answer, dict):
        return None
    error = answer.get("error")
    if isinstance(error, dict):
        error = error.get("message") or error
    if not error and answer.get("object") == "error":
        error = answer.get("message") or answer
    if not error and "choices" not in answer:
        error = answer.get("detail")
    return None if not error else error if isinstance(error, str) else orjson.dumps(error).decode()


def is_overload(answer: object) -> bool:
    """Whether an error says that there are too many requests: TGI's `error_type`, or its OpenAI message."""
    if not isinstance(answer, dict):
        return False
    return answer.get("error_type") == "overloaded" or error_message(answer) == "Model is overloaded"


def refusal(reply: HttpReply) -> Reply:
    """A reply whose status is not 200, with the server's own words; of a web page its title, if any."""
    answer = loads(reply.body)
    message = error_message(answer)
    if message is None and (page := _TITLE.search(reply.body[:4096])):
        message = (
            f"HTTP {reply.status} and a web page, {' '.join(page[1].decode(errors='replace').split())!r}"
        )
    error = message or reply.body[:300].decode(errors="replace").strip()
    error = error or f"HTTP {reply.status} without a body"
    return Reply([Event(len(reply.body), Kind.ERROR, None)], error=error, overloaded=is_overload(answer))


def is_stream(reply: HttpReply) -> bool:
    """Whether the body is server-sent events, by its header or by its looks."""
    if "event-stream" in reply.headers.get("content-type", ""):
        return True
    return reply.body.lstrip().startswith((b"data:", b"event:", b":"))


def loads_all(payloads: Sequence[bytes]) -> list[Any]:
    """Every payload as a JSON value: in one go where all are sound, which costs a third, else one by one."""
    answers = loads(b"[" + b",".join(payloads) + b"]")
    if isinstance(answers, list) and len(answers) == len(payloads):
        return answers
    return [loads(payload) for payload in payloads]


def loads(payload: bytes) -> Any:
    """The JSON value, or the bytes themselves where they are none (a stray byte in UTF-8 is forgiven)."""
    with suppress(orjson.JSONDecodeError):
        return orjson.loads(payload)
    with suppress(orjson.JSONDecodeError):
        return orjson.loads(payload.decode(errors="replace"))
    return payload


def answers_in(reply: HttpReply) -> list[Any]:
    """Every JSON value of a whole reply, streamed or plain; ValueError where one is an error."""
    payloads = server_sent_events(reply.body)[0] if is_stream(reply) else [reply.body]
    answers = loads_all([payload for payload in payloads if payload != DONE])
    if any(_is_broken(answer) or error_message(answer) is not None for answer in answers):
        raise ValueError("not a whole reply")
    return [answer for answer in answers if isinstance(answer, dict)]


MOST_TOKENS = 2**31 - 1
_REASON = re.compile(r"[A-Za-z][\w .:-]{0,63}", re.ASCII)


def understood(decode: Callable[[HttpReply], Reply], reply: HttpReply) -> Reply:
    """The decoded reply, checked. Never raises: a reply that makes no sense has an `error`.

    This is the one way from bytes to a `Reply`. Counts are whole numbers from 0 to `MOST_TOKENS`, the finish
    reason is a word, texts are printable and hold no secret of ours. Where one of them is not so, its field
    is left out and `error` says what came instead.
    """
    try:
        answer = decode(reply)
        wrong = dict(_wrong(answer))
    except Exception as error:  # whatever a server can make an adapter or its libraries do
        what = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        return Reply([], error=words_of_server(f"invalid reply: {what}"))
    if not wrong and answer.error is None:
        return answer
    message = answer.error or "invalid reply: " + ", ".join(f"{name} is {wrong[name]}" for name in wrong)
    without: dict[str, Any] = dict.fromkeys(wrong)
    if "n_tok" in without:
        without["events"] = without.pop("n_tok") or []
    return replace(answer, **without, error=words_of_server(str(message)))


def _wrong(reply: Reply) -> Iterator[tuple[str, str]]:
    names = ("n_prompt_tok", "n_output_ids", "n_output_usage", "n_cached_tok", "n_reasoning_tok")
    counts = [*((name, getattr(reply, name)) for name in names), *(("n_tok", e.n_tok) for e in reply.events)]
    for name, n in counts:
        if n is not None and not (type(n) is int and 0 <= n <= MOST_TOKENS):
            yield name, f"{n!r:.80}"
    reason: object = reply.finish_reason
    if reason is not None and not (isinstance(reason, str) and _REASON.fullmatch(reason)):
        yield "finish_reason", f"{reason!r:.80}"


def server_sent_events(body: bytes) -> tuple[list[bytes], list[int]]:
    """The data of every event in the body, and the offset just past the blank line that ends each.

    Comments, and events without data, are no events. The data of several `data:` lines is joined by newlines.
    The grammar is the WHATWG's (https://html.spec.whatwg.org/multipage/server-sent-events.html, section
    9.2.6), with two leniencies, for servers that exist: an event that the end of the body cuts short of its
    blank line is still handed out, and so is an error that stands on a line without `data:`.
    """
    return _plain_events(body) or _any_events(body)


def _plain_events(body: bytes) -> tuple[list[bytes], list[int]] | None:
    """The same for what nearly every server sends, at a fraction of the cost; None where it is not that.

    That is: one `data:` line an event, `\\n` for a line's end, a blank line after each event.
    """
    lines = body.split(b"\n")
    if lines.pop() or len(lines) % 2 or any(lines[1::2]) or b"\r" in body:
        return None
    lines = lines[::2]
    payloads = [line[5:].removeprefix(b" ") for line in lines if line.startswith(b"data:")]
    if len(payloads) != len(lines):
        return None
    return payloads, list(accumulate(len(line) + 2 for line in lines))


def _any_events(body: bytes) -> tuple[list[bytes], list[int]]:
    payloads: list[bytes] = []
    ends: list[int] = []
    data: list[bytes] = []
    begin = 3 if body.startswith(b"\xef\xbb\xbf") else 0
    while begin < len(body):
        line_end = _LINE_END.search(body, begin)
        line = body[begin : line_end.start()] if line_end else body[begin:]
        begin = line_end.end() if line_end else len(body)
        if line == b"data" or line.startswith((b"data:", b'{"error"')):
            data.append(line.removeprefix(b"data").removeprefix(b":").removeprefix(b" "))
        if data and (not line or begin == len(body)):
            payloads.append(b"\n".join(data))
            ends.append(begin)
            data = []
    return payloads, ends
