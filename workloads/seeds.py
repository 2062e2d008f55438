"""Randomness by name: every stream has its own generator, so that adding a stream moves no other."""

from __future__ import annotations

import hashlib

import numpy as np


def rng(seed: int, name: str) -> np.random.Generator:
    """The generator of the stream `name` under `seed`; seed 0 is a seed like any other."""
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    return np.random.Generator(np.random.PCG64(int.from_bytes(digest[:16], "little")))
