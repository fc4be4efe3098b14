"""TensorBoardCallback: the metrics of the run for TensorBoard.

Guarantee: a process of its own reads the journal and writes the file; a disk that is full or slow costs the training
nothing, and a restart leaves no step twice.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from framework.callback import Callback
from framework.goodput.tracking.side_process import SideProcess
from framework.goodput.tracking.tensorboard_log import check_installed

if TYPE_CHECKING:
    from framework.trainer import Trainer

FINISH_SECONDS = 30.0  # the longest wait at the end; what is missing then is written without the trainer


class TensorBoardCallback(Callback):
    """The curves that MLflow gets, as an event file. Needs `pip install 'goodput-framework[tensorboard]'`.

    Args:
        folder: Where event files go; default `tensorboard` in the run directory.
    """

    critical = False

    def __init__(self, folder: str | None = None) -> None:
        check_installed()
        self._target = None if folder is None else Path(folder).absolute()
        self._process: SideProcess | None = None

    def setup(self, trainer: Trainer) -> None:
        if not trainer.world.is_main:
            return
        run = trainer.run.path
        words = [str(run), "--tensorboard", str(self._target or run / "tensorboard")]
        words += ["--parent-pid", str(os.getpid()), "--attempt", str(trainer.attempt)]
        self._process = SideProcess("framework.goodput.tracking.follower", words, run / "exporter.log")
        self._process.start()

    def close(self, trainer: Trainer) -> None:
        if self._process is not None:
            self._process.finish(FINISH_SECONDS)
