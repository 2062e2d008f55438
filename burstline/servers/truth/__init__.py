"""The known-truth server: speaks OpenAI's completions on an exact schedule, and logs what it did.

`script` says when the tokens of a reply are sent, `openai` in which words, `replies` makes its bytes and
times, `router` decides which reply a request gets, `serve` sends replies over sockets, `exchanges` keeps the
truth of each, `rig` starts a server for a certificate.
"""

STATEMENT = "true: "
"""Begins each line that the server prints of its times at its end."""
