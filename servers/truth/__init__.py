"""The known-truth server: speaks the engines' dialects on an exact, scripted schedule, and logs what it did.

`script` says what one reply does, `dialects` in which words, `timed_reply` makes its bytes and times of it,
`router` decides which reply a request gets (also through a `queue`, a prefix cache, or shed), `serve` plays
replies over sockets, `exchanges` keeps the truth of each, `rig` starts a server for a test or a certificate.
"""
