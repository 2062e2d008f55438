"""Which engine answers at a URL, by its own words."""

import re

from servers.engine import EngineError, Get
from servers.registry import ENGINES

UNKNOWN = "openai"
"""The registry's name for a server that does not say what it is."""
MODELS = "/v1/models"


def engine_at(get: Get) -> str | None:
    """The registry's name of what is there; UNKNOWN for a server that does not say, None for no server.

    Only GET requests are sent. A server that refuses them (no key, a load balancer) counts as one that
    does not say.
    """
    pages: dict[str, bytes] = {}
    try:
        pages[MODELS] = get(MODELS).body
    except EngineError:
        return None
    signs = [(sign, name) for name, engine in ENGINES.items() for sign in engine.signs]
    # The page that is here already, first.
    for sign, name in sorted(signs, key=lambda row: row[0].path != MODELS):
        try:
            if sign.path not in pages:
                pages[sign.path] = get(sign.path).body
        except EngineError:
            return UNKNOWN
        if re.search(sign.pattern, pages[sign.path], re.MULTILINE):
            return name
    return UNKNOWN
