"""The places in the trainer that a callback may fill.

Guarantee: the trainer knows who saves and who restores by these methods alone; with an empty place nobody does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from framework.progress import Progress

if TYPE_CHECKING:
    from framework.checkpoint import Found
    from framework.trainer import Trainer


class Saver(Protocol):
    """Decides when to save and drives the store: `trainer.saver`."""

    def is_due(self, before: Progress, after: Progress) -> bool:
        """Whether the step between the two ends an interval; the same on all ranks."""

    def save(self, trainer: Trainer, reason: str, wait: bool) -> None:
        """Saves the state at the safe point; with `wait` it is committed when this returns."""

    def fence(self, *, before_update: bool = False) -> None:
        """Returns when no save reads the live tensors any more; `before_update` says that an update comes next."""

    def finish(self, trainer: Trainer) -> None:
        """Waits for a save that is under way."""


class Restorer(Protocol):
    """Finds and loads a checkpoint: `trainer.restorer`."""

    def restore(self, trainer: Trainer) -> Found | None:
        """Restores the newest good checkpoint; none if there is none."""
