"""CSVCallback: the metrics of the run as a CSV file.

Guarantee: a process of its own reads the journal and writes the file; a disk that is full or slow costs the training
nothing, and a restart leaves no step twice.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from framework.callback import Callback
from framework.goodput.tracking.side_process import SideProcess

if TYPE_CHECKING:
    from framework.trainer import Trainer

FINISH_SECONDS = 30.0  # the longest wait at the end; what is missing then is written without the trainer


class CSVCallback(Callback):
    """One row a step, one column a metric: what MLflow gets, for tools that read tables.

    Args:
        file: The file; default `metrics.csv` in the run directory.
    """

    critical = False

    def __init__(self, file: str | None = None) -> None:
        self._target = None if file is None else Path(file).absolute()
        self._process: SideProcess | None = None

    def setup(self, trainer: Trainer) -> None:
        if not trainer.world.is_main:
            return
        run = trainer.run.path
        words = [str(run), "--csv", str(self._target or run / "metrics.csv")]
        words += ["--parent-pid", str(os.getpid()), "--attempt", str(trainer.attempt)]
        self._process = SideProcess("framework.goodput.tracking.follower", words, run / "exporter.log")
        self._process.start()

    def close(self, trainer: Trainer) -> None:
        if self._process is not None:
            self._process.finish(FINISH_SECONDS)
