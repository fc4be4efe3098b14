"""What every step computed, on its way to the journal.

Guarantee: recording a step never waits for the device; values are copied out in batches, every 5 s or 100 steps and
before every save, so that a committed step is always in the log.
"""

from __future__ import annotations

import math
import time

import numpy as np
import torch
from torch import Tensor

from framework.journal import Journal
from framework.loop.meter import Meter

FLUSH_STEPS = 100
FLUSH_SECONDS = 5.0


class StepLog:
    """Collects the results of steps and writes them to the journal as `steps` events.

    Args:
        journal: Where to; none on ranks other than 0.

    Attributes:
        last_loss: Loss of the last flushed step; `nan` before.
        last_metrics: Recipe metrics of the last flushed step.
    """

    def __init__(self, journal: Journal | None) -> None:
        self._journal = journal
        self.last_loss = math.nan
        self.last_metrics: dict[str, float] = {}
        self._reset(0)

    def _reset(self, next_step: int) -> None:
        self._first = next_step
        self._start = time.time()
        self._losses: list[Tensor] = []
        self._rates: list[float] = []
        self._metrics: list[dict[str, Tensor]] = []
        self._seconds: list[dict[str, float]] = []
        self._skipped: list[int] = []
        self._flush_at = time.monotonic() + FLUSH_SECONDS

    def begin(self, step: int) -> None:
        """The next record is that of the step after `step`; its time starts now."""
        self._reset(step + 1)

    def add(self, loss: Tensor, rate: float, metrics: dict[str, Tensor]) -> None:
        """Records one step: global loss `[]`, learning rate, recipe metrics `[]`; tensors stay on their device."""
        self._losses.append(loss)
        self._rates.append(rate)
        self._metrics.append(metrics)

    def skipped(self, step: int) -> None:
        """The update of this step was left out."""
        self._skipped.append(step)

    def end_step(self, meter: Meter) -> None:
        """The step's safe point is over: closes its record, and writes if enough has gathered."""
        if len(self._seconds) < len(self._losses):
            self._seconds.append(meter.take())
            if len(self._losses) >= FLUSH_STEPS or time.monotonic() >= self._flush_at:
                self._write()
        else:
            self.phases(meter)

    def flush(self, meter: Meter) -> None:
        """Writes everything now, in mid-step too; what follows before `end_step` is written as phases."""
        if len(self._seconds) < len(self._losses):
            self._seconds.append(meter.take())
        self._write()

    def phases(self, meter: Meter) -> None:
        """Writes time that belongs to no step record, and starts the next record now."""
        for category, seconds in meter.take().items():
            if self._journal is not None:
                self._journal.event("phase", name=category, start=self._start, seconds=seconds)
            self._start += seconds
        self._start = time.time()

    def _write(self) -> None:
        if not self._losses:
            return
        if self._journal is not None:
            losses = torch.stack(self._losses).tolist()
            metrics = _columns(self._metrics)
            self.last_loss = losses[-1]
            self.last_metrics = {name: column[-1] for name, column in metrics.items() if column[-1] is not None}
            self._journal.event(
                "steps", first=self._first, start=self._start, seconds=_sparse(self._seconds), loss=losses,
                lr=self._rates, skipped=self._skipped, metrics=metrics,
            )  # fmt: skip
        self._reset(self._first + len(self._losses))


def _columns(rows: list[dict[str, Tensor]]) -> dict[str, list[float | None]]:
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: [float(row[name]) if name in row else None for row in rows] for name in names}


def _sparse(rows: list[dict[str, float]]) -> dict[str, list[float]]:
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: np.round([row.get(name, 0.0) for row in rows], 7).tolist() for name in names}
