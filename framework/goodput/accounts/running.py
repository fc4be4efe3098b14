"""The account of a run in the process that trains, over all attempts, this one included.

Guarantee: giving it an event costs the training a queue's put. A thread reads what earlier attempts left and does the
sums, for a tenth of its time at most; until it has read all of that there are no figures.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from framework.ending import Background
from framework.goodput.accounts.ledger import Ledger
from framework.goodput.accounts.results import Goodput
from framework.journal import attempt_files, read_file

SHARE = 0.1  # of its time that the thread works at most: while it does, the training cannot have the interpreter
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
        self._changed = threading.Condition()
        self._is_urgent, self._is_over = threading.Event(), threading.Event()
        self._given = self._taken = 0  # events of this attempt
        files = attempt_files(events)
        for number, file in files:
            if number == attempt:
                for event in read_file(file):
                    self.add(event)
        self._thread = Background(lambda: self._work([file for number, file in files if number < attempt]), "goodput")
        self._thread.start()

    def add(self, event: Mapping[str, Any]) -> None:
        """Takes the next event of this attempt."""
        self._given += 1
        self._queue.put(event)

    def total(self, patience: float = 0.0) -> Goodput | None:
        """The account up to now; none while earlier attempts are still being read.

        Args:
            patience: How long to wait for the sums of what was given, seconds. They are done without pauses from then on.
        """
        with self._changed:
            if patience > 0:
                self._is_urgent.set()
                self._changed.wait_for(lambda: self._taken == self._given, patience)
            return self._ledger.total(time.time()) if self._taken else None

    def close(self) -> None:
        """Nothing more will come or be asked. Closing twice is fine."""
        self._is_over.set()
        self._is_urgent.set()
        self._queue.put(None)
        self._thread.join(END_SECONDS)

    def _work(self, earlier: list[Path]) -> None:
        for past in self._paced(event for file in earlier for event in read_file(file)):
            self._ledger.add(past)  # nobody asks it before all is there
        for event in self._paced(self._coming()):
            with self._changed:
                self._ledger.add(event)
                self._taken += 1
                self._changed.notify_all()

    def _coming(self) -> Iterator[Mapping[str, Any]]:
        while (event := self._queue.get()) is not None:
            yield event

    def _paced(self, events: Iterable[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
        """The events, with a pause for what getting and using each of them took.

        A low priority would do worse: a thread that is put aside while it has the interpreter keeps it from the training.
        """
        began = time.thread_time()
        for event in events:
            if self._is_over.is_set():
                return
            yield event
            self._is_urgent.wait((time.thread_time() - began) * (1 / SHARE - 1))
            began = time.thread_time()
