"""Whether the server lives under load: its process, and whether any stream still brings tokens."""

from __future__ import annotations

from collections.abc import Callable

from burstline.bench.progress import Snapshot
from burstline.bench.server_session import Site
from servers.engine import EngineError
from servers.host.ready import getter
from servers.protocol.introspection import log_message

SILENCE_S = 20.0
"""So long without a byte from any open stream is told: an engine whose model process died may not notice."""
HEALTH_TIMEOUT_S = 2.0

Say = Callable[[str], None]


class VitalSigns:
    """Looks at every snapshot of a load; `died_s` is when the server's process was found ended."""

    def __init__(self, site: Site, say: Say) -> None:
        self.died_s: float | None = None
        self.silences: list[str] = []
        self._site, self._say = site, say
        self._n_bytes, self._since_s = -1, 0.0
        self._lost = 0

    def look(self, now: Snapshot) -> None:
        """Tell a death at once, and a silence once it has lasted SILENCE_S."""
        n_open = now.sent - now.done - now.failed
        server = self._site.server
        if self.died_s is None and server is not None and not server.alive():
            self.died_s, self._lost = now.elapsed_s, max(n_open, 0)
            self._say(self.death() or "")
        if now.n_bytes != self._n_bytes or n_open <= 0:
            self._n_bytes, self._since_s = now.n_bytes, now.elapsed_s
        elif now.elapsed_s - self._since_s >= SILENCE_S:
            self._since_s = float("inf")  # told once, until something comes
            self.silences.append(self._silence(n_open))
            self._say(self.silences[-1])

    def death(self) -> str | None:
        """That the server died, when, its last words, and what it took with it; None while it lives.

        A server whose launcher lives is dead too where its log says that its engine is.
        """
        server, engine = self._site.server, self._site.engine
        if server is None:
            return None
        if server.alive():
            cause, how = engine.dead(server.log()), "its launcher lives"
            if cause is None:
                return None
        else:
            cause = engine.root_cause(server.log()) or log_message(server.last_line())
            how = f"exit code {server.exit_code}"
        when = "during the load" if self.died_s is None else f"{self.died_s:.1f} s into the load"
        lost = f"; {self._lost:,} requests were open" if self._lost else ""
        return f"{engine.title} died {when} ({how}{lost}): {cause}"

    def _silence(self, n_open: int) -> str:
        text = f"No token from any of {n_open:,} streams for {SILENCE_S:g} s"
        path = self._site.engine.probe_path
        if path is None:
            return text
        try:
            status = getter(self._site.target, timeout_s=HEALTH_TIMEOUT_S)(path).status
        except EngineError:
            return f"{text}; {path} does not answer either"
        return f"{text}; the server still says healthy ({path} answers {status})"
