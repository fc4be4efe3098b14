"""PreemptionCallback: what signals do.

Guarantee: a handler only sets a flag; the loop saves the last completed step and ends with the exit code of the signal.
A second signal ends the process at once. Handlers that were there before are put back.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import threading
from types import FrameType
from typing import TYPE_CHECKING, Any

from framework.callback import Callback
from framework.errors import EXIT_REQUEUE, EXIT_SIGINT, EXIT_SIGTERM

if TYPE_CHECKING:
    from framework.trainer import Trainer

EXIT_CODES = {signal.SIGTERM: EXIT_SIGTERM, signal.SIGINT: EXIT_SIGINT, signal.SIGUSR1: EXIT_REQUEUE}


class PreemptionCallback(Callback):
    """SIGTERM and SIGINT: save, exit 143 or 130. SIGUSR1: save, exit 75 (start me again). SIGQUIT: print all stacks."""

    promise = "a signal ends the run at once, without a checkpoint"

    def __init__(self) -> None:
        self._before: dict[int, Any] = {}
        self._received: signal.Signals | None = None

    def setup(self, trainer: Trainer) -> None:
        if threading.current_thread() is not threading.main_thread():
            return  # Python delivers signals to the main thread alone
        self._pid = os.getpid()
        self._trainer = trainer
        for number in EXIT_CODES:
            self._before[number] = signal.signal(number, self._handle)
        if sys.__stderr__ is not None:
            faulthandler.register(signal.SIGQUIT, file=sys.__stderr__, all_threads=True)

    def train_end(self, trainer: Trainer, status: str) -> None:
        if self._received is not None:
            trainer.record("signal", signal=self._received.name)

    def close(self, trainer: Trainer) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        if self._before:
            faulthandler.unregister(signal.SIGQUIT)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._pid:
            return  # a forked child that kept the handler
        if self._received is not None:
            signal.signal(number, signal.SIG_DFL)
            os.kill(self._pid, number)
            return
        self._received = signal.Signals(number)
        self._trainer.request_stop(f"received {self._received.name}", EXIT_CODES[self._received])
