"""Progress: the immutable record of what is done.

Guarantee: it counts completed steps and consumed samples only; nothing prefetched, nothing half done, never a clock.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple


class Progress(NamedTuple):
    """What a run has completed.

    Args:
        step: Completed optimizer steps, skipped ones included.
        position: Samples consumed over all epochs: the place in the infinite sequence of sample ids.
        epoch: The epoch that `position` lies in.
        skipped: Steps whose update was left out because loss or gradient was not finite.
    """

    step: int = 0
    position: int = 0
    epoch: int = 0
    skipped: int = 0

    def advance(self, position: int, epoch: int) -> Progress:
        """The record after one more step that ended at `position`."""
        return Progress(self.step + 1, position, epoch, self.skipped)

    def with_skipped(self, count: int) -> Progress:
        """The record with `count` more skipped steps."""
        return Progress(self.step, self.position, self.epoch, self.skipped + count)

    def state_dict(self) -> dict[str, int]:
        return self._asdict()

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Any]) -> Progress:
        return cls(int(state["step"]), int(state["position"]), int(state["epoch"]), int(state["skipped"]))
