"""The known-truth server: speaks OpenAI's completions on an exact schedule, and logs what it did.

`replies` makes the bytes of a reply and their times from a script, `router` decides which reply a request
gets, `serve` sends replies over sockets and keeps the truth of each, `rig` starts a server for a certificate.
"""

STATEMENT = "true: "
"""Begins each line that the server prints of its times at its end."""
