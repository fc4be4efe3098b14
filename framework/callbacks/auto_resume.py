"""AutoResumeCallback: finds the newest checkpoint that is whole, checks that it fits, and restores it.

Guarantee: nothing of the run is changed before everything was read and checked, and all ranks restore the same one.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from framework.callback import Callback
from framework.callbacks.contents import put_back
from framework.checkpoint import CheckpointReader, CheckpointStore, Found
from framework.errors import StateMismatchError
from framework.loop import attempt

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
        found = self._reader.newest_valid()
        for damaged in self._reader.rejected:
            trainer.record("set_aside", path=str(damaged.path), moved_to=str(damaged.moved_to), reason=damaged.reason)
        if found is None:
            return None
        shared = self._reader.read_shared(found)
        notes = self._compare(trainer, found, shared)
        parts = trainer.built.parts
        parts.check(shared, trainer.allows)
        tensors = parts.template(found.entries, trainer.allows)
        self._reader.check(found, tensors)
        trainer.built.warm_up()
        self._reader.load(found, tensors)
        notes += parts.adopt(tensors, shared)
        notes += put_back(trainer, shared, self._reader.read_rank(found))
        seconds = time.monotonic() - started
        self._tell(trainer, found, notes, seconds)
        return found

    def _compare(self, trainer: Trainer, found: Found, shared: Mapping[str, Any]) -> list[str]:
        """Differences that are allowed, as notes; others are refused.

        Raises:
            StateMismatchError: The seed differs and `run.allow` does not permit it.
        """
        if shared["seed"] != trainer.seed and not trainer.allows("seed"):
            raise StateMismatchError(
                f"seed={trainer.seed}, but {found.path} was written with seed={shared['seed']}. "
                f"Use that seed, another run.name, or permit it with run.allow=[seed]."
            )
        now: dict[str, Any] = {
            "world size": trainer.world.size,
            "global batch": trainer.settings.global_batch_size,
            "threads": torch.get_num_threads(),
            **attempt.versions(),
        }
        then: dict[str, Any] = {
            "world size": shared["world_size"],
            "global batch": shared["global_batch_size"],
            "threads": found.manifest.threads,
            **found.manifest.versions,
        }
        return [f"{key} is now {value}, was {then[key]}" for key, value in now.items() if then.get(key, value) != value]

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
