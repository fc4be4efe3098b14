"""The books of a loader: what was handed out, what of it was trained, and what loading it counted.

Guarantee: nothing that was only prefetched is in the books. A batch that was handed out counts as in use until it is
committed; where nobody commits, until two more were handed out.
"""

from __future__ import annotations

import logging
from collections import deque

from framework.data.position import Token
from framework.data.receipt import Receipt
from framework.data.stats import DataStats

log = logging.getLogger(__name__)

_KEPT = 2  # batches that a plain loop may still use: the one that it works on, and one that is on its way to the device


class Delivery:
    """What one loader handed out. Not thread-safe.

    Args:
        is_committed: Whether somebody calls `commit`, so that batches are in use until then.
        name: Whose samples, for the log.

    Attributes:
        retired: Batches with a smaller number are in use no more.
        stats: What was counted since it was last taken.
        keeps_receipts: Whether `commit` gives receipts.
        number: Of the batch that is handed out next; numbers grow as long as the loader lives.
    """

    def __init__(self, *, is_committed: bool, name: str) -> None:
        self.retired = 0
        self.stats = DataStats()
        self.keeps_receipts = False
        self._is_committed = is_committed
        self._name = name
        self.number = 0
        self._receipts: deque[Receipt] = deque()
        self._told: set[int] = set()

    def begin(self, number: int) -> None:
        """Starts anew with batch `number`; what was handed out before and not committed never will be."""
        if self._is_committed:
            self.retired = number
        self.number = number
        self._receipts.clear()

    def hand_out(self, number: int, token: Token, receipt: Receipt | None) -> None:
        """Enters a batch that goes to whoever trains."""
        self.number = number + 1
        if not self._is_committed:
            self.retired = max(self.retired, number + 1 - _KEPT)
        if receipt is None:
            self.stats.samples += token.count
            return
        self.stats.add(receipt.stats)
        for index, what in receipt.replaced.values():
            self._tell(index, what, "another sample takes its place" if receipt.ids.size == token.count else "left out")
        if self.keeps_receipts:
            self._receipts.append(receipt)

    def commit(self, batches: int) -> list[Receipt]:
        """Enters that the next `batches` that were handed out were trained.

        Returns:
            Their receipts, if they are kept.

        Raises:
            ValueError: Fewer were handed out.
        """
        self._is_committed = True
        if self.retired + batches > self.number:
            raise ValueError(f"{batches} batches cannot be committed: {self.number - self.retired} were handed out.")
        self.retired += batches
        return [self._receipts.popleft() for _ in range(min(batches, len(self._receipts)))]

    def _tell(self, index: int, what: str, outcome: str) -> None:
        if index not in self._told:
            self._told.add(index)
            log.warning("%s: %s: %s (loader.on_error)", self._name, what.removesuffix("."), outcome)
