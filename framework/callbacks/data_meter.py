"""DataMeterCallback: what loading did, beside how long the loop waited for it.

Guarantee: rank 0's counts go to the journal as they are, every 50 steps and at the end; nothing waits for it, and no
number of the training changes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from framework.callback import Callback
from framework.data.stats import DataStats

if TYPE_CHECKING:
    from framework.recipe import StepOutput
    from framework.trainer import Trainer


class DataMeterCallback(Callback):
    """Writes a `data` event with the loader's counts: cache hits, bytes fetched, read times, retries, replaced workers."""

    critical = False
    every = 50
    promise = "what loading did is not counted: the report cannot say why data is late"

    def step_end(self, trainer: Trainer, output: StepOutput) -> None:
        self._record(trainer)

    def train_end(self, trainer: Trainer, status: str) -> None:
        self._record(trainer)

    def _record(self, trainer: Trainer) -> None:
        if not trainer.world.is_main:
            return
        stats = trainer.built.loader.take_stats()
        if stats != DataStats():
            trainer.record("data", step=trainer.progress.step, **stats.to_json())
