"""Random numbers that belong to the sample, not to the process.

Guarantee: what python's, numpy's and torch's default generators give while a sample is made depends on the seed, the
epoch and the sample's key alone: not on the worker, the rank, or what was loaded before. The generators of the process
itself can be captured and put back bit by bit.
"""

from __future__ import annotations

import contextlib
import hashlib
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

EVALUATION = -1  # the "epoch" of evaluation: its samples are the same whenever it runs


def sample_key(seed: int, epoch: int, key: int | str) -> int:
    """The 64-bit seed of one sample in one epoch.

    Args:
        seed: Seed of the run.
        epoch: Number of the epoch from 0, or `EVALUATION`.
        key: What identifies the sample: its index, or the relative path of its file.
    """
    text = f"sample/1|{seed}|{epoch}|{'i' if isinstance(key, int) else 's'}{key}"
    digest = hashlib.blake2b(text.encode("utf-8", "surrogateescape"), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def seed_sample(key: int) -> None:
    """Seeds python's, numpy's and torch's default generators for one sample. Takes about 6 µs.

    Args:
        key: From `sample_key`: 0 to 2**64 - 1.
    """
    random.seed(key)
    # numpy and torch both run a Mersenne twister from 32 bits: from the same bits they would give the same numbers.
    np.random.seed(key >> 32)
    torch.default_generator.manual_seed(key & 0xFFFFFFFF)  # torch.manual_seed would take 150 µs for all devices


def derive(seed: int, *labels: int | str) -> int:
    """A 63-bit seed for one purpose, out of the seed of the run: hashed, so that no two purposes share a stream.

    Args:
        seed: Seed of the run.
        labels: What the seed is for, for example `"eval", 1200`.
    """
    digest = hashlib.blake2b(repr(("derive/1", seed, *labels)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def seed_all(seed: int) -> None:
    """Seeds every default generator of this process: python, numpy, torch on the CPU and on all CUDA devices.

    Args:
        seed: From `derive`, or any integer from 0 to 2**64 - 1.
    """
    seed_sample(seed)
    torch.cuda.manual_seed_all(seed)  # remembered until CUDA is in use


def capture() -> dict[str, Any]:
    """The state of every default generator of this process: python, numpy, torch on the CPU and each CUDA device.

    Returns:
        Tensors, lists, numbers and strings only, so that `torch.load(weights_only=True)` reads it. `cuda` is empty
        where CUDA is not in use.
    """
    version, words, gauss = random.getstate()
    return {
        "python": {"version": version, "words": list(words), "gauss": gauss},
        "numpy": plain(np.random.get_state(legacy=False)),
        "torch": torch.default_generator.get_state(),
        "cuda": torch.cuda.get_rng_state_all() if is_cuda_used() else [],
    }


def restore(state: dict[str, Any]) -> None:
    """Puts back what `capture` returned.

    Where this process sees fewer CUDA devices than then, the first ones get their state back.

    Raises:
        KeyError, ValueError: `state` is not from `capture`.
    """
    python = state["python"]
    random.setstate((python["version"], tuple(python["words"]), python["gauss"]))
    np.random.set_state(state["numpy"])
    torch.default_generator.set_state(state["torch"])
    if state["cuda"]:
        for device, saved in zip(range(torch.cuda.device_count()), state["cuda"], strict=False):
            torch.cuda.set_rng_state(saved, device)


@contextlib.contextmanager
def forked(seed: int | None = None) -> Iterator[None]:
    """Whatever is drawn inside leaves no trace outside: all default generators are put back at the end.

    Args:
        seed: If given, the generators start from it inside.
    """
    state = capture()
    try:
        if seed is not None:
            seed_all(seed)
        yield
    finally:
        restore(state)


@contextlib.contextmanager
def kept() -> Iterator[None]:
    """Like `forked`, for the three generators that `seed_sample` touches. Takes about 60 µs."""
    python, array, tensor = random.getstate(), np.random.get_state(legacy=False), torch.default_generator.get_state()
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(array)
        torch.default_generator.set_state(tensor)


def is_cuda_used() -> bool:
    """Whether this process has begun to use CUDA. Asking does not begin it."""
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]


def plain(value: Any) -> Any:
    """Arrays and numpy's numbers inside nested dicts as lists and plain numbers, which `weights_only` reads back."""
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    return value.tolist() if isinstance(value, np.ndarray | np.generic) else value
