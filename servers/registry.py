"""Every engine Burstline can start, watch and stop: one line each."""

from servers.engine import Engine

ENGINES: dict[str, Engine] = {}
