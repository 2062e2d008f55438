"""The known-truth server: speaks the engines' dialects on an exact, scripted schedule, and logs what it did.

`script` says what one reply does, `dialects` in which words, `scene` makes its bytes and times of it, `desk`
decides which scene a request gets (also through a queue, a prefix cache, or shed), `serve` plays scenes over
sockets, `rig` starts a server for a test or a certificate, `adapter` makes an engine of it.
"""
