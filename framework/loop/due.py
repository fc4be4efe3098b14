"""Whether a step ends with a save, and why.

Guarantee: all ranks decide alike. Where a run can go on only from the end of an epoch, nothing is saved elsewhere; what
was asked for there is told, and made up for at the end of the epoch.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from framework.loop.control import Requests
from framework.progress import Progress

if TYPE_CHECKING:
    from framework.trainer import Trainer

log = logging.getLogger(__name__)

EPOCH = "epoch"  # the strategy that knows no place within an epoch


class Due:
    """Decides, at the safe point of each step, whether the run is saved there.

    Args:
        strategy: How the place in the data is kept.
    """

    def __init__(self, strategy: str) -> None:
        self._waits = strategy == EPOCH
        self._waiting = ""  # why there will be a save at the end of the epoch

    def reason(self, trainer: Trainer, before: Progress, requests: Requests | None, is_last: bool) -> str:
        """Why the step from `before` on ends with a save; empty if it does not.

        Args:
            trainer: At its safe point.
            before: Progress before the step.
            requests: What was agreed on, if anything.
            is_last: Whether the run ends here.
        """
        reason = self._asked(trainer, before, requests, is_last)
        if not self._waits:
            return reason
        if trainer.progress.epoch > before.epoch:
            reason, self._waiting = reason or self._waiting, ""
        elif reason and not (is_last and not trainer.stop.stop):  # the end of the budget is kept, wherever it is
            self._tell(trainer, reason, is_last)
            reason, self._waiting = "", reason
        return reason

    def _asked(self, trainer: Trainer, before: Progress, requests: Requests | None, is_last: bool) -> str:
        if is_last:
            return trainer.stop.stop or "end"
        if requests is not None and requests.rollback:
            return ""
        if requests is not None and requests.save:
            return requests.save
        return "interval" if trainer.saver is not None and trainer.saver.is_due(before, trainer.progress) else ""

    def _tell(self, trainer: Trainer, reason: str, is_last: bool) -> None:
        if trainer.saver is None or self._waiting == reason or not trainer.world.is_main:
            return
        epoch = trainer.progress.epoch
        then = (
            f"the run will begin with epoch {epoch} again" if is_last else f"it is made up for when epoch {epoch} ends"
        )
        log.warning(
            "step %d: nothing is saved in the middle of epoch %d (loader.position=epoch), though asked for (%s): %s",
            trainer.progress.step, epoch, reason, then,
        )  # fmt: skip
