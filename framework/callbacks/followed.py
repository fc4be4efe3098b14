"""What the callbacks share that have the journal copied into a file of another kind.

Guarantee: a process of its own reads the journal and writes the file; a disk that is full or slow costs the training
nothing, and a restart leaves no step twice.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from framework.callback import Callback
from framework.goodput.tracking.side_process import SideProcess

if TYPE_CHECKING:
    from framework.trainer import Trainer

FINISH_SECONDS = 30.0  # the longest wait at the end; what is missing then is written without the trainer


class FollowedCallback(Callback):
    """Starts the process that copies the metrics, on rank 0, and waits for it at the end.

    Args:
        target: Where they go; default `usual` in the run directory.
    """

    critical = False
    option: ClassVar[str]  # of `framework.goodput.tracking.follower`
    usual: ClassVar[str]

    def __init__(self, target: str | None = None) -> None:
        self._target = None if target is None else Path(target).absolute()
        self._process: SideProcess | None = None

    def setup(self, trainer: Trainer) -> None:
        if not trainer.world.is_main:
            return
        run = trainer.run.path
        words = [str(run), self.option, str(self._target or run / self.usual)]
        words += ["--parent-pid", str(os.getpid()), "--attempt", str(trainer.attempt)]
        self._process = SideProcess("framework.goodput.tracking.follower", words, run / "exporter.log")
        self._process.start()

    def close(self, trainer: Trainer) -> None:
        if self._process is not None:
            self._process.finish(FINISH_SECONDS)
