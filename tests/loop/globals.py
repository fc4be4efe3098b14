"""The process-wide state that a trainer touches."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from framework.data.seeding import forked


@contextmanager
def process_state() -> Iterator[None]:
    """Puts back what a trainer in the test process changes: determinism, threads, generators, launcher variables."""
    deterministic = torch.are_deterministic_algorithms_enabled()
    fill = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    benchmark, threads = torch.backends.cudnn.benchmark, torch.get_num_threads()
    environment = dict(os.environ)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        os.environ.pop(name, None)
    try:
        with forked(None):
            yield
    finally:
        os.environ.clear()
        os.environ.update(environment)
        torch.use_deterministic_algorithms(deterministic)
        torch.utils.deterministic.fill_uninitialized_memory = fill  # type: ignore[attr-defined]
        torch.backends.cudnn.benchmark = benchmark
        torch.set_num_threads(threads)
