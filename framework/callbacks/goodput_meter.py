"""GoodputMeterCallback: measures where the main thread's time goes.

Guarantee: measuring costs a clock reading per phase, changes no number of the training, and waits for nothing. A run
that is finished stays finished if nobody reads its last line.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from typing import TYPE_CHECKING

from framework.callback import Callback
from framework.goodput.accounts.running import RunningAccount
from framework.loop.meter import LapMeter, timing_event

if TYPE_CHECKING:
    from framework.trainer import Trainer


log = logging.getLogger(__name__)


class GoodputMeterCallback(Callback):
    """Writes the seconds of each step by category to the journal, keeps the account of the run for whoever shows it, and
    prints its goodput at the end."""

    critical = False
    promise = "time is not measured: there is no goodput to report"

    def __init__(self) -> None:
        self._account: RunningAccount | None = None

    def setup(self, trainer: Trainer) -> None:
        is_queued = trainer.world.device.type == "cuda"  # steps return before the device has computed them
        trainer.meter = LapMeter(event=timing_event if is_queued else None)
        if trainer.world.is_main and trainer.journal is not None:
            self._account = RunningAccount(trainer.run.events, trainer.attempt)
            trainer.journal.listeners.append(self._account.add)
            trainer.goodput = self._account.total

    def close(self, trainer: Trainer) -> None:
        if self._account is not None:
            self._account.close()
        if trainer.world.is_main:
            from framework.goodput.reporting.report import summary_line

            _print(summary_line(trainer.run))


def _print(line: str) -> None:
    """Prints a line; on the log, if standard output is closed, full, or cannot write these letters."""
    try:
        print(line, flush=True)
    except (OSError, ValueError):
        log.info("%s", line)
        # what Python still holds for it would fail once more when it exits, with an exit code of its own
        with contextlib.suppress(OSError, ValueError):
            sink = os.open(os.devnull, os.O_WRONLY)
            os.dup2(sink, sys.stdout.fileno())
            os.close(sink)
