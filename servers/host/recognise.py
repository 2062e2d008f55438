"""Which engine answers at a URL, by its own words."""

import re
from contextlib import suppress

from servers.identity import Sign
from servers.messages import EngineError, Get
from servers.registry import ENGINES

UNKNOWN = "openai"
"""The registry's name for a server that does not say what it is."""
MODELS = "/v1/models"


def engine_at(get: Get, expected: str | None = None) -> str | None:
    """The registry's name of what is there; UNKNOWN for a server that does not say, None for no server.

    Only GET requests are sent. A server that refuses them (no key, a load balancer) counts as one that
    does not say. Where it shows a sign of the `expected` engine, no other is looked for (nor imported).
    """
    pages: dict[str, bytes] = {}
    try:
        pages[MODELS] = get(MODELS).body
    except EngineError:
        return None
    if expected is not None and expected in ENGINES:
        with suppress(EngineError):
            if any(_shows(sign, get, pages) for sign in ENGINES[expected].signs):
                return expected
    signs = [(sign, name) for name, engine in ENGINES.items() for sign in engine.signs]
    # The page that is here already, first.
    for sign, name in sorted(signs, key=lambda row: row[0].path != MODELS):
        try:
            if _shows(sign, get, pages):
                return name
        except EngineError:
            return UNKNOWN
    return UNKNOWN


def _shows(sign: Sign, get: Get, pages: dict[str, bytes]) -> bool:
    if sign.path not in pages:
        pages[sign.path] = get(sign.path).body
    return re.search(sign.pattern, pages[sign.path], re.MULTILINE) is not None
