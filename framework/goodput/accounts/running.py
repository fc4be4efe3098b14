"""The account of a run in the process that trains, over all attempts, this one included.

Guarantee: giving it an event costs the training a queue's put. A thread reads what earlier attempts left and does the
sums; until it has read all of that there are no figures.
"""

from __future__ import annotations

import contextlib
import os
import queue
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from framework.ending import Background
from framework.goodput.accounts.ledger import Ledger
from framework.goodput.accounts.results import Goodput
from framework.journal import attempt_files, read_file

NICE = 19  # of the thread: the training goes first
END_SECONDS = 1.0  # the longest wait for the thread at the end


class RunningAccount:
    """Kept on rank 0.

    Args:
        events: The folder `events` of the run directory.
        attempt: Number of this attempt; what is in its journal by now counts too.
    """

    def __init__(self, events: Path, attempt: int) -> None:
        self._queue: queue.SimpleQueue[Mapping[str, Any] | None] = queue.SimpleQueue()
        self._ledger = Ledger()
        self._lock = threading.Lock()
        self._is_complete = False
        files = attempt_files(events)
        for number, file in files:
            if number == attempt:
                for event in read_file(file):
                    self._queue.put(event)
        self._thread = Background(lambda: self._work([file for number, file in files if number < attempt]), "goodput")
        self._thread.start()

    def add(self, event: Mapping[str, Any]) -> None:
        """Takes the next event of this attempt."""
        self._queue.put(event)

    def total(self) -> Goodput | None:
        """The account up to now; none while earlier attempts are still being read."""
        with self._lock:
            return self._ledger.total(time.time()) if self._is_complete and self._ledger.attempts else None

    def close(self) -> None:
        """Nothing more will come. Closing twice is fine."""
        self._queue.put(None)
        self._thread.join(END_SECONDS)

    def _work(self, earlier: list[Path]) -> None:
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)
        for file in earlier:
            for past in read_file(file):
                self._ledger.add(past)  # nobody asks it before all is there
        for event in self._coming():
            with self._lock:
                self._ledger.add(event)
                self._is_complete = True

    def _coming(self) -> Iterator[Mapping[str, Any]]:
        while (event := self._queue.get()) is not None:
            yield event
