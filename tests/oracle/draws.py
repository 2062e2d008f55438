"""Random loads for the whole command, each from a seed: what is asked, and how the servers behave."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

KINDS = (
    "burst",
    "closed",
    "closed random lengths",
    "closed workers",
    "constant",
    "poisson",
    "ramp",
    "steps",
    "replay",
    "sessions",
    "closed sessions",
    "closed for a time",
    "text",
    "chats",
    "chat sessions",
    "shared prefixes",
)
WORDS = tuple(f"word{k}" for k in range(400))
"""The vocabulary of what is sent as text: a word is a token, for the tokenizer here and for the server."""
BEATS = (
    ": keep-alive",
    "data:",
    "data: ping",
    'event: ping\ndata: {"type": "ping"}',
    'data: {"choices": []}',
    "data: {}",
)
FIELDS = ("content", "content", "reasoning_content", "reasoning_details", "novel", "tool_calls", "refusal")
"""Where the text of a chat stands."""
ODD_USAGE = ("final", "zeros", "prompt", "choice", "stale", "role", "gateway", "bare")
FAULTS: tuple[dict[str, Any], ...] = (
    {"status": 500},
    {"status": 503},
    {"fault": "reset", "fault_after_tok": 2},
    {"fault": "close", "fault_after_tok": 2},
    {"fault": "stall", "fault_after_tok": 1},
)


@dataclass(frozen=True)
class Draw:
    """A load of a few seconds: `words` of the command line, a script for each reply, and how many servers.

    `rows` are a data file's; with `needs_tokenizer` a folder with one is handed over. With `bare_list` the
    servers list their models without an object around them.
    """

    seed: int
    kind: str
    words: tuple[str, ...]
    scripts: tuple[dict[str, Any], ...]
    n_servers: int
    ttft_slo_s: float
    arrival_times_s: tuple[float, ...] = ()
    rows: tuple[dict[str, Any], ...] = ()
    needs_tokenizer: bool = False
    bare_list: bool = False


def draw(seed: int) -> Draw:
    """The load of a seed; every kind comes up in turn."""
    random = np.random.default_rng(seed)
    kind = KINDS[seed % len(KINDS)]
    times: tuple[float, ...] = ()
    rows: tuple[dict[str, Any], ...] = ()
    prompts = ["--prompt-tokens", "8..24"]
    of_text = kind in ("text", "chats", "chat sessions")
    n_servers = int(random.choice([1, 1, 1, 2]))
    # Slots that all do the same work end together, whichever driver has them.
    is_even = kind == "closed workers"
    low, high = (6, 6) if kind == "closed" or is_even else (3, int(random.integers(8, 40)))
    lengths = f"{low}..{high}" if high > low else str(low)
    n_requests = int(random.integers(60, 160))
    load: list[str] = []
    if kind == "burst":
        load = ["--requests", str(n_requests)]
    elif kind == "closed for a time":
        load = ["--concurrency", str(int(random.choice([4, 8, 16]))), "--duration-s", "2"]
    elif kind.startswith("closed") and "sessions" not in kind:
        c = int(random.choice([5, 10, 14] if kind == "closed workers" else [4, 8, 16, 32]))
        load = ["--requests", str(n_requests + 2 * c), "--concurrency", str(c)]
        if kind == "closed workers":
            n_servers = 1
            load = ["--requests", str(20 * c), "--concurrency", str(c)]
            load += ["--workers", str(int(random.integers(2, 5)))]
    elif kind in ("constant", "poisson"):
        rate = float(random.choice([40, 60, 80]))
        load = ["--rate", f"{rate:g}", "--arrival", kind]
        load += ["--duration-s", "2.5"] if random.random() < 0.4 else ["--requests", str(int(rate * 2.5))]
    elif kind == "ramp":
        load = ["--arrival", "ramp:20..80", "--requests", str(n_requests)]
    elif kind == "steps":
        load = ["--arrival", "steps:30x1,60x1"]
    elif kind == "replay":
        times = tuple(np.sort(random.uniform(0, 2, n_requests)).round(4).tolist())
    elif kind == "text":
        load = ["--rate", "40", "--requests", "120", "--endpoint", "chat"]
    elif kind == "chats":
        load, prompts = ["--rate", "40", "--endpoint", "chat"], []
        rows = tuple(_chat(random) for _ in range(120))
    elif kind == "shared prefixes":
        load, prompts = ["--rate", "40", "--requests", "100"], ["--prompt-tokens", "48..96"]
        load += ["--shared-prefix", "32,groups=3"]
    elif kind in ("sessions", "chat sessions"):
        load = ["--sessions", "20", "--turns", "3", "--think-s", "0.05..0.3", "--rate", "15"]
        load += ["--endpoint", "chat"] if kind == "chat sessions" else []
    else:
        load = ["--sessions", "24", "--turns", "3", "--think-s", "0.01..0.05", "--concurrency", "6"]
    if of_text:
        n_servers = 1
    if "sessions" not in kind and kind != "replay" and random.random() < 0.2:
        load += ["--warmup", "5"]
    n_tok = int(random.choice([1, 1, 3]))
    fast, slow = sorted(random.uniform(0.01, 0.12, 2))
    slow = fast if is_even else slow + 0.06
    base: dict[str, Any] = {
        "gaps_s": float(random.uniform(0.004, 0.02)),
        "tok_per_event": n_tok,
        # Only a growing count says how many tokens an event of several has.
        "usage": "cumulative" if n_tok > 1 else str(random.choice(["final", "last", "cumulative", "off"])),
        "crlf": bool(random.random() < 0.3),
        "chunked": bool(random.random() < 0.8),
    }
    if of_text or kind == "shared prefixes":
        # Without usage the length of a chat's prompt, and what a cache served, are not known.
        base["usage"] = "final" if n_tok == 1 else "cumulative"
    base |= _habits(seed, kind, n_tok)
    fails = "sessions" not in kind and not is_even and random.random() < 0.35
    scripts = []
    for k in range(400):
        own = {**base, "ttft_s": float(fast if random.random() < 0.6 else slow)}
        # The first ones are what a server is probed with before the load.
        if fails and k >= 12 and random.random() < 0.04:
            own |= FAULTS[int(random.integers(len(FAULTS)))]
            own["chunked"] = True
        scripts.append(own)
    words = [*load, *prompts, "--output-tokens", lengths, "--deadline-s", "3"]
    if not fails and "sessions" not in kind and not is_even and random.random() < 0.2:
        # Long enough that the hang-up reaches the server before the reply's end leaves it.
        words[words.index("--output-tokens") + 1] = "24..40"
        words += ["--cancel-share", "0.3,after=2"]
    slo_s = round(float(fast + slow) / 2, 4) if slow > fast else 1.0
    words += ["--slo", f"ttft<={slo_s:g}s", "--max-failures", "50%"]
    bare = bool(np.random.default_rng([seed, 2]).random() < 0.2)
    return Draw(seed, kind, tuple(words), tuple(scripts), n_servers, slo_s, times, rows, of_text, bare)


def _habits(seed: int, kind: str, n_tok: int) -> dict[str, Any]:
    """What servers do in a stream that may change no figure: heartbeats, odd usage, text in other fields."""
    random = np.random.default_rng([seed, 1])
    own: dict[str, Any] = {}
    if random.random() < 0.5:
        times_s = np.sort(random.uniform(0.01, 0.3, 3)).round(4).tolist()
        own |= {"beat": str(random.choice(BEATS)), "comments_s": times_s}
    if kind in ("text", "chats", "chat sessions") and n_tok == 1:
        own["usage"] = str(random.choice(ODD_USAGE))
    if kind in ("text", "chats"):
        own["field"] = str(random.choice(FIELDS))
    if own.get("usage") == "role" or random.random() < 0.2:
        own["role_s"] = 0.005
    own["opens"] = int(random.choice([200, 200, 200, 201, 202]))
    return own


def _chat(random: np.random.Generator) -> dict[str, Any]:
    """A conversation of some turns whose last is a user's."""

    def said() -> str:
        return " ".join(random.choice(WORDS, int(random.integers(3, 12))))

    roles = [role for _ in range(int(random.integers(1, 4))) for role in ("user", "assistant")][:-1]
    messages: list[dict[str, Any]] = [{"role": role, "content": said()} for role in roles]
    if random.random() < 0.3:
        call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
        messages += [{"role": "assistant", "content": None, "tool_calls": [call]}]
        messages += [{"role": "tool", "tool_call_id": "1", "content": said()}]
    return {"messages": messages, "output_tokens": int(random.integers(3, 30))}
