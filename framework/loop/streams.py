"""Streams of random numbers of the process itself: dropout, noise, whatever a recipe draws.

Guarantee: every stream is seeded by a hash of the run's seed and the stream's name, never by adding numbers, so that
two streams of two runs coincide only if both seed and name do.
"""

from __future__ import annotations

from framework.data import seeding

BUILD, TRAIN, EVAL = "build", "train", "eval"


def derive(seed: int, name: str, number: int = 0) -> int:
    """The seed of a named stream, 64 bits.

    Args:
        seed: Seed of the run.
        name: `build`, `train` or `eval`.
        number: Tells streams of one name apart: a rank, a step.
    """
    return seeding.sample_key(seed, number, f"stream/{name}")


def start(key: int) -> None:
    """Starts python's, numpy's and torch's default generators from one key, on the CPU and on every CUDA device."""
    seeding.seed_all(key)
