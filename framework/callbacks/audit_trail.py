"""Writes down which samples a run trains, for `python -m framework.data audit RUN`.

Guarantee: a step is in the log before a checkpoint that holds it is committed. A log that cannot be written stops the
run: an audit with holes proves nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from framework.data.audit.log import AuditLog, log_path
from framework.data.receipt import Receipt
from framework.loop.update import Skip

if TYPE_CHECKING:
    from framework.trainer import Trainer


class AuditTrail:
    """The log of this rank of this attempt.

    Args:
        trainer: It has built everything and started nothing.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._log: AuditLog | None = None
        trainer.built.loader.wants_receipts = True
        trainer.batch_listeners.append(self._trained)
        trainer.skip_listeners.append(self._skipped)

    def begin(self, trainer: Trainer) -> None:
        """The first step follows."""
        built = trainer.built
        self._log = AuditLog(
            log_path(trainer.run.events, trainer.attempt, trainer.world.rank),
            {
                "attempt": trainer.attempt,
                "rank": trainer.world.rank,
                "world": trainer.world.size,
                "step": trainer.progress.step,
                "samples": built.num_samples,
                "strategy": built.strategy,
                "epoch_end": trainer.loader_settings.epoch_end,
                "global_batch": trainer.settings.global_batch_size,
                "starts": list(getattr(built.loader.dataset, "starts", [0])),
                # of a stream that knows no ids: its samples are numbered by who read them
                "readers": trainer.world.size * max(1, built.loader.num_workers) * built.data.is_numbered_by_readers,
            },
        )

    def back(self, step: int) -> None:
        """Training goes on from `step`."""
        if self._log is not None:
            self._log.back(step)

    def sync(self) -> None:
        """What was trained so far is on the disk."""
        if self._log is not None:
            self._log.sync()

    def close(self) -> None:
        """The run is over."""
        if self._log is not None:
            self._log.close()

    def _trained(self, step: int, receipts: list[Receipt]) -> None:
        if self._log is not None:
            self._log.trained(step, receipts)

    def _skipped(self, skip: Skip) -> None:
        if self._log is not None:
            self._log.left_out(skip.step)
