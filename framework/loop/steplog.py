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
from framework.loop.meter import PRODUCTIVE, DataWait, Laps, Meter
from framework.stepmark import StepMark

FLUSH_STEPS = 100
FLUSH_SECONDS = 5.0


class StepLog:
    """Collects the results of steps and writes them to the journal as `steps` events.

    Args:
        journal: Where to; none on ranks other than 0.
        mark: What survives of a step that is not written yet.

    Attributes:
        last_loss: Loss of the last flushed step; `nan` before.
        last_metrics: Recipe metrics of the last flushed step.
    """

    def __init__(self, journal: Journal | None, mark: StepMark) -> None:
        self._journal = journal
        self._mark = mark
        self.last_loss = math.nan
        self.last_metrics: dict[str, float] = {}
        self._reset(0, time.time())

    def _reset(self, next_step: int, start: float) -> None:
        self._first = next_step
        self._start = start
        self._losses: list[Tensor | float] = []
        self._rates: list[float] = []
        self._metrics: list[dict[str, Tensor] | None] = []
        self._laps: list[Laps] = []
        self._skipped: list[int] = []
        self._flush_at = time.monotonic() + FLUSH_SECONDS

    def begin(self, step: int) -> None:
        """The next record is that of the step after `step`; its time starts now."""
        self._reset(step + 1, time.time())

    def add(self, loss: Tensor, rate: float, metrics: dict[str, Tensor]) -> None:
        """Records one step: global loss `[]`, learning rate, recipe metrics `[]`; tensors stay on their device."""
        # on the CPU there is nothing to wait for, and a number is cheaper to keep than a tensor
        self._losses.append(loss.item() if loss.is_cpu else loss)
        self._rates.append(rate)
        self._metrics.append(metrics or None)
        self._mark.set(self._first + len(self._losses) - 1)

    def skipped(self, step: int) -> None:
        """The update of this step was left out."""
        self._skipped.append(step)

    def end_step(self, meter: Meter) -> None:
        """The step's safe point is over: closes its record, and writes if enough has gathered."""
        if len(self._laps) < len(self._losses):
            self._laps.append(meter.take())
            if len(self._losses) >= FLUSH_STEPS or time.monotonic() >= self._flush_at:
                self._write()
        else:
            self.phases(meter)

    def flush(self, meter: Meter) -> None:
        """Writes everything now, in mid-step too; what follows before `end_step` is written as phases."""
        if len(self._laps) < len(self._losses):
            self._laps.append(meter.take())
        self._write()

    def close(self) -> None:
        """Nothing more will be added."""
        self._mark.close()

    def phases(self, meter: Meter) -> None:
        """Writes time that belongs to no step record, and starts the next record now."""
        now = time.time()  # writing takes time too, and that is in what the meter counts next
        for category, seconds in meter.take():
            if self._journal is not None:
                self._journal.event("phase", name=category, start=self._start, seconds=seconds)
            self._start += seconds
        self._start = now

    def _write(self) -> None:
        if not self._losses:
            return
        now = time.time()
        if self._journal is not None:
            losses = _numbers(self._losses)
            metrics = _columns(self._metrics)
            self.last_loss = losses[-1]
            self.last_metrics = {name: column[-1] for name, column in metrics.items() if column[-1] is not None}
            self._journal.event(
                "steps", first=self._first, start=self._start, seconds=_seconds(self._laps), loss=losses,
                lr=self._rates, skipped=self._skipped, metrics=metrics,
            )  # fmt: skip
        self._reset(self._first + len(self._losses), now)


def _numbers(values: list[Tensor | float]) -> list[float]:
    """The values on the host; waits for the device once."""
    tensors = [value for value in values if isinstance(value, Tensor)]
    return torch.stack(tensors).tolist() if tensors else values  # type: ignore[no-any-return,return-value]


def _columns(rows: list[dict[str, Tensor] | None]) -> dict[str, list[float | None]]:
    names = dict.fromkeys(name for row in rows if row for name in row)
    return {name: _column([row.get(name) if row else None for row in rows]) for name in names}


def _column(values: list[Tensor | None]) -> list[float | None]:
    """The values on the host; waits for a device once, not for each value."""
    if all(value is not None and not value.is_cpu for value in values):
        return torch.stack(values).tolist()  # type: ignore[no-any-return,arg-type]
    return [None if value is None else value.item() for value in values]


def _seconds(steps: list[Laps]) -> dict[str, list[float]]:
    """Seconds of each step by category; a wait in which the device still computed is no wait."""
    columns: dict[str, list[float]] = {}
    for index, laps in enumerate(steps):
        for category, seconds in laps:
            column = columns.get(category)
            if column is None:
                column = columns[category] = [0.0] * len(steps)
            if type(seconds) is DataWait:
                idle = seconds.idle_seconds()
                columns.setdefault(PRODUCTIVE, [0.0] * len(steps))[index] += seconds - idle
                seconds = idle
            column[index] += seconds
    return dict(zip(columns, np.round(list(columns.values()), 7).tolist(), strict=True))
