"""GoodputMeterCallback: measures where the main thread's time goes.

Guarantee: measuring costs a clock reading per phase, changes no number of the training, and waits for nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from framework.callback import Callback
from framework.loop.meter import LapMeter

if TYPE_CHECKING:
    from framework.trainer import Trainer


class GoodputMeterCallback(Callback):
    """Writes the seconds of each step by category to the journal, and prints the goodput of the run at its end."""

    critical = False
    promise = "time is not measured: there is no goodput to report"

    def setup(self, trainer: Trainer) -> None:
        trainer.meter = LapMeter()

    def close(self, trainer: Trainer) -> None:
        if trainer.world.is_main:
            from framework.goodput.report import summary_line

            print(summary_line(trainer.run.path), flush=True)
