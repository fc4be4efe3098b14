"""Datasets as they were before anybody read from them.

Guarantee: every epoch begins with a dataset that no earlier epoch has touched, so that one that is used up, counts on
from where it was, or keeps the place that it was resumed at, gives its whole epoch again. Where a dataset cannot be
copied the one object serves all epochs, as with torch's own loader.
"""

from __future__ import annotations

import copy
import logging
from typing import Any

import numpy as np
import torch

LARGE_BYTES = 1 << 20  # arrays of this size are data, which is shared; smaller ones may be an order, and are copied
LARGE_ITEMS = 10_000  # lists of this length are copied without what is in them
_DEPTH = 4  # of attributes and containers in which large things are looked for

log = logging.getLogger(__name__)


class Pristine:
    """Hands out a dataset for each epoch.

    Args:
        dataset: It has not been read from yet. The first epoch gets this very object, later ones copies of what it was.
        name: Of its class, for messages.

    Attributes:
        is_copied: Whether it can be copied at all.
    """

    def __init__(self, dataset: Any, name: str) -> None:
        self._dataset = dataset
        self._is_first = True
        self._first_epoch = getattr(dataset, "epoch", None)
        self.is_copied = True
        try:
            self._pristine = copied(dataset)
        except Exception as error:  # a file, a socket, a generator: anything may refuse
            log.debug("%s cannot be copied: %s", name, error)
            self.is_copied = False
            self._pristine = dataset

    def get(self, epoch: int) -> Any:
        """The dataset for the iteration of an epoch; it is told which one that is.

        By `set_epoch(epoch)` where it has that method; else a whole number that it keeps in `epoch` is counted up.
        """
        if not self.is_copied or self._is_first:
            dataset, self._is_first = self._dataset, False
        else:
            dataset = copied(self._pristine)
        tell_epoch(dataset, epoch, self._first_epoch)
        return dataset

    def spare(self, epoch: int) -> Any | None:
        """A copy to try something with; none where it cannot be copied."""
        if not self.is_copied:
            return None
        dataset = copied(self._pristine)
        tell_epoch(dataset, epoch, self._first_epoch)
        return dataset


def tell_epoch(dataset: Any, epoch: int, first: Any) -> None:
    """Tells a dataset which epoch comes next.

    Args:
        dataset: The dataset.
        epoch: Number of the epoch, from 0.
        first: What its attribute `epoch` was before it was read from, if it had one.
    """
    if callable(getattr(dataset, "set_epoch", None)):
        dataset.set_epoch(epoch)
    elif type(first) is int:
        dataset.epoch = first + epoch


def copied(dataset: Any) -> Any:
    """A copy that can be read from without a trace in the original; large arrays are shared.

    Raises:
        Exception: Whatever a part of it raises that cannot be copied.
    """
    memo: dict[int, Any] = {}
    _share_large(dataset, memo, _DEPTH)
    return copy.deepcopy(dataset, memo)


def _share_large(value: Any, memo: dict[int, Any], depth: int) -> None:
    """Enters into the memo of a deep copy what is not to be copied."""
    if isinstance(value, torch.Tensor):
        if value.numel() * value.element_size() >= LARGE_BYTES:
            memo[id(value)] = value
    elif isinstance(value, np.ndarray):
        if value.nbytes >= LARGE_BYTES:
            memo[id(value)] = value
    elif isinstance(value, list | dict) and len(value) >= LARGE_ITEMS:
        memo[id(value)] = copy.copy(value)
    elif depth and id(value) not in memo:
        if isinstance(value, dict):
            parts: Any = value.values()
        elif isinstance(value, list | tuple):
            parts = value if len(value) < LARGE_ITEMS else ()
        else:
            parts = vars(value).values() if hasattr(value, "__dict__") and not isinstance(value, type) else ()
        for part in list(parts):
            _share_large(part, memo, depth - 1)
