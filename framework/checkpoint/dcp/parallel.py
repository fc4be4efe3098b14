"""Several files at once, and no more of them after an error."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")


def each(threads: int, work: Callable[[T], R], items: Iterable[T]) -> list[R]:
    """What `work` gives for each item, in their order.

    Raises:
        Exception: What `work` raised first; what had not begun by then is left out.
    """
    pool = ThreadPoolExecutor(threads)
    try:
        return list(pool.map(work, items))
    finally:
        pool.shutdown(cancel_futures=True)
