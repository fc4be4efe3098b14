"""ProgressCallback: how far the run is.

Guarantee: exactly one display, on rank 0. On a terminal a bar that starts where the run resumed, below all lines of the
log; elsewhere plain lines without control codes, one at least every 10 s and far fewer than one a second.
"""

from __future__ import annotations

import logging
import math
import os
import sys
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TextIO

from framework.callback import Callback

if TYPE_CHECKING:
    from framework.recipe import StepOutput
    from framework.trainer import Trainer

REDRAW, LINE = "0.5s", "10s"
LAST_SECONDS = 1.0  # that the last line may wait for the figures of the last steps


class ProgressCallback(Callback):
    """A progress bar on a terminal, plain lines elsewhere.

    Args:
        bar: Whether to draw a bar; default on a terminal that can.
    """

    critical = False

    def __init__(self, bar: bool | None = None) -> None:
        self._is_bar = _can_draw() if bar is None else bar
        self.every = REDRAW if self._is_bar else LINE
        self._bar: Any = None
        self._task: Any = None
        self._handlers: list[tuple[logging.StreamHandler[Any], TextIO]] = []
        self._is_on = False
        self._first = 0
        self._since = 0.0

    def train_start(self, trainer: Trainer, resumed: bool) -> None:
        self._is_on = trainer.world.is_main
        self._first, self._since = trainer.progress.step, time.monotonic()
        if self._is_on and self._is_bar:
            self._open_bar(trainer)

    def step_end(self, trainer: Trainer, output: StepOutput) -> None:
        if self._is_on:
            self._show(trainer)

    def eval_end(self, trainer: Trainer, metrics: Mapping[str, float]) -> None:
        if self._is_on:
            values = "  ".join(f"{name} {value:.4g}" for name, value in metrics.items())
            self._line(f"step {trainer.progress.step}  {values}")

    def train_end(self, trainer: Trainer, status: str) -> None:
        if not self._is_on:
            return
        trainer.log.flush(trainer.meter)
        self._show(trainer, patience=LAST_SECONDS)
        self._close_bar()
        reason = f": {trainer.stop.stop}" if trainer.stop.stop else ""
        self._line(f"{status} at step {trainer.progress.step}{reason}")

    def exception(self, trainer: Trainer, error: BaseException) -> None:
        self._close_bar()

    def close(self, trainer: Trainer) -> None:
        self._close_bar()

    def _show(self, trainer: Trainer, patience: float = 0.0) -> None:
        step, total = trainer.progress.step, trainer.total_steps
        if self._bar is not None:
            self._bar.update(
                self._task, completed=step, loss=_number(trainer.log.last_loss), rate=self._rate(step),
                goodput=_goodput(trainer, patience),
            )  # fmt: skip
            return
        of = f"/{total}" if total is not None else ""
        self._line(
            f"step {step}{of}  epoch {trainer.progress.epoch}  loss {_number(trainer.log.last_loss)}  {self._rate(step)}"
            f"  {_goodput(trainer, patience)}".rstrip()
        )

    def _rate(self, step: int) -> str:
        """Steps per second of this attempt: what earlier ones did is not divided by its time."""
        seconds = time.monotonic() - self._since
        return f"{(step - self._first) / seconds:.1f} steps/s" if seconds > 0 else ""

    def _line(self, text: str) -> None:
        if self._bar is not None:
            self._bar.console.print(text, highlight=False)
        else:
            print(text, flush=True)

    def _open_bar(self, trainer: Trainer) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        self._bar = Progress(
            TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(),
            TextColumn("loss {task.fields[loss]}"), TextColumn("{task.fields[rate]}"),
            TextColumn("{task.fields[goodput]}"),
            redirect_stderr=sys.stderr is not None and sys.stderr.isatty(),  # one that goes to a file stays there
        )  # fmt: skip
        self._put_log_above()
        self._bar.start()
        self._task = self._bar.add_task(
            trainer.name, total=trainer.total_steps, completed=trainer.progress.step, loss="-", rate="", goodput=""
        )

    def _close_bar(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
        while self._handlers:
            handler, stream = self._handlers.pop()
            if isinstance(handler.stream, _AboveBar):
                handler.setStream(stream)

    def _put_log_above(self) -> None:
        """Handlers hold the stream they were made with, so that their lines would land in the bar."""
        for handler in logging.getLogger().handlers:
            if not isinstance(handler, logging.StreamHandler):
                continue
            stream = handler.stream
            if stream is not None and stream in (sys.stderr, sys.stdout) and stream.isatty():
                self._handlers.append((handler, stream))
                handler.setStream(_AboveBar(self._bar.console, stream))


class _AboveBar:
    """A stream whose text is put above the bar.

    In a forked child it writes to the terminal: a thread of the parent may have held the console's lock at the fork.
    """

    def __init__(self, console: Any, stream: TextIO) -> None:
        self._console, self._stream, self._pid = console, stream, os.getpid()

    def write(self, text: str) -> int:
        if os.getpid() != self._pid:
            return self._stream.write(text)
        self._console.print(text, end="", markup=False, highlight=False, emoji=False, soft_wrap=True)
        return len(text)

    def flush(self) -> None:
        self._stream.flush()


def _can_draw() -> bool:
    from rich.console import Console

    console = Console()
    return console.is_terminal and not console.is_dumb_terminal and sys.stdout.isatty()


def _goodput(trainer: Trainer, patience: float) -> str:
    """What is known of the run so far, over all attempts."""
    account = trainer.goodput(patience)
    if account is None or not account.is_measured:
        return ""
    return f"goodput {account.ratio:.0%}  data wait {account.data_fetch_fraction:.0%}"


def _number(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.4g}"
