"""AutoResumeCallback: finds the newest checkpoint that is whole, checks that it fits, and restores it.

Guarantee: nothing of the run is changed before everything was read and checked, and all ranks restore the same one.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from framework.callback import Callback
from framework.callbacks.contents import put_back
from framework.callbacks.data_position import DataPositionCallback
from framework.checkpoint import CheckpointReader, CheckpointStore, Found
from framework.errors import StateMismatchError
from framework.loop import differences

if TYPE_CHECKING:
    from framework.trainer import Trainer

log = logging.getLogger(__name__)


class AutoResumeCallback(Callback):
    """Continues a run where its newest good checkpoint left it; a damaged one is set aside, and the one before is used."""

    promise = "a run that is started again does not continue"

    def setup(self, trainer: Trainer) -> None:
        self._reader = CheckpointReader(CheckpointStore(trainer.run.checkpoints), trainer.world, trainer.group)
        trainer.restorer = self

    def restore(self, trainer: Trainer) -> Found | None:
        """Restores the newest good checkpoint, if there is one.

        Raises:
            CheckpointError: There are checkpoints, and none is whole.
            StateMismatchError: The newest one does not fit this run.
        """
        started = time.monotonic()
        self._reader.remote = trainer.remote
        found = self._reader.newest_valid(local_suffices=trainer.progress.step > 0)  # of a rollback
        for damaged in self._reader.rejected:
            trainer.record("set_aside", path=str(damaged.path), moved_to=str(damaged.moved_to), reason=damaged.reason)
        for path, reason in trainer.remote.repaired if trainer.remote is not None else ():
            trainer.record("repaired", path=str(path), reason=reason)
        if found is None:
            return None
        shared = self._reader.read_shared(found)
        notes = differences.notes_on(trainer, found, shared)
        self._check_data(trainer, shared)
        parts = trainer.built.parts
        parts.check(shared, trainer.allows)
        tensors = parts.template(found.entries, trainer.allows)
        try:
            self._reader.check(found, tensors)
        except StateMismatchError as error:
            raise StateMismatchError(f"{error} run.allow=[model] takes over what fits and leaves the rest.") from error
        rank = self._reader.read_rank(found)
        if trainer.world.is_main:
            self._reader.store.note_resumed(found.step, trainer.attempt)  # retention leaves it alone
        trainer.fence()
        trainer.built.warm_up()
        self._reader.load(found, tensors)
        notes += parts.adopt(tensors, shared)
        notes += put_back(trainer, shared, rank)
        seconds = time.monotonic() - started
        self._tell(trainer, found, notes, seconds)
        return found

    def _check_data(self, trainer: Trainer, shared: Mapping[str, Any]) -> None:
        """Refuses other data before anything is loaded.

        Raises:
            StateMismatchError: The data differ and `run.allow` does not permit it.
        """
        for name, callback in trainer.callbacks.items():
            if isinstance(callback, DataPositionCallback) and name in shared["callbacks"]:
                callback.check(shared["callbacks"][name])

    def _tell(self, trainer: Trainer, found: Found, notes: list[str], seconds: float) -> None:
        progress = trainer.progress
        path = found.path.relative_to(trainer.run.path)
        trainer.record(
            "restored",
            step=progress.step,
            position=progress.position,
            checkpoint=str(path),
            seconds=seconds,
            notes=notes,
        )
        if trainer.world.is_main:
            log.info(
                "resumed at step %d (sample %d) from %s in %.2f s",
                progress.step,
                progress.position,
                found.path,
                seconds,
            )
            for note in notes:
                log.warning("resume: %s", note)
