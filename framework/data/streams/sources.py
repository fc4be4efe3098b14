"""Who does the tasks of a rank's readers: this process, or workers.

Guarantee: answers come in the order of the tasks, whoever is faster. A worker that dies is replaced by one that goes on
after the last answer that arrived: no sample is missing and none comes twice. Every wait is bounded.
"""

from __future__ import annotations

import logging
import os
import pickle
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from multiprocessing import util
from typing import Any

import torch

from framework.data.device import pin
from framework.data.limits import Limits
from framework.data.process import GRACE_SECONDS, Worker, how_it_ended
from framework.data.seeding import kept
from framework.data.serving import Board
from framework.data.streams.answering import Answer, StreamFetch, Task
from framework.data.streams.reader import Place
from framework.data.workers import DUMP_SECONDS, LOOK_SECONDS, MOST_DEATHS, WorkerError
from framework.errors import DataError

log = logging.getLogger(__name__)

Given = tuple[Any, Answer]


def after(place: Place, task: Task, answer: Answer) -> Place:
    """Where a reader is once it has answered a task."""
    place = task.place or place
    taken = place.taken + answer.samples
    if answer.state is None:
        return replace(place, taken=taken)
    return replace(place, taken=taken, state=answer.state, at=taken)


class InProcess:
    """One reader, which works when it is waited for.

    Args:
        fetch: The reader.
        is_pinned: Whether batches come in page-locked memory.
    """

    readers = 1

    def __init__(self, fetch: StreamFetch, *, is_pinned: bool) -> None:
        self._fetch = fetch
        self._is_pinned = is_pinned
        self._tasks: dict[int, Task] = {}
        self._number = 0

    def send(self, reader: int, task: Task) -> int:
        """Gives a task; returns its number."""
        self._number += 1
        self._tasks[self._number] = task
        return self._number

    def is_here(self, number: int) -> bool:
        """Whether a task is done."""
        return False

    def wait(self, number: int) -> Given:
        """Samples and answer of a task, once.

        Raises:
            DataError: The stream failed.
        """
        with kept():
            given, answer = self._fetch.serve(number, self._tasks.pop(number), (), 0)
        return (pin(given) if self._is_pinned and answer.is_whole else given), answer

    def clear(self) -> None:
        """What was given is not wanted any more. The next task of each reader has a place."""
        self._tasks.clear()

    def close(self) -> None:
        """Nothing is open."""


class Workers:
    """One process for each reader. Not thread-safe.

    Args:
        fetch: What each of them is.
        readers: How many, at least 1.
        depth: Batches that are prepared ahead, all together.
        timeout_seconds: Longest wait for an answer.
        choose_method: Gives the start method of a worker that starts now.
        worker_restarts: How many workers that die are replaced per epoch.
        is_pinned: Whether batches come in page-locked memory.
        name: Who waits, for messages.

    Attributes:
        restarts: Workers that were replaced.

    Raises:
        DataError: The dataset or the collate function cannot be sent to a worker.
    """

    def __init__(
        self, fetch: StreamFetch, readers: int, depth: int, *, timeout_seconds: float, choose_method: Callable[[], str],
        worker_restarts: int, is_pinned: bool, name: str,
    ) -> None:  # fmt: skip
        self.restarts = 0
        self.readers = readers
        self._fetch: Any = fetch
        self._timeout_seconds = timeout_seconds
        self._choose_method = choose_method
        self._worker_restarts = worker_restarts
        self._device_index = torch.accelerator.current_device_index() if is_pinned else None
        self._name = name
        self._number = 0
        self._owed: dict[int, tuple[int, Task]] = {}  # reader and task by number, until it is waited for
        self._replaced: Counter[int] = Counter()  # by epoch
        self._deaths: Counter[int] = Counter()  # by number of the task that was due
        self._changed = threading.Condition()  # guards the two below, which the receivers fill
        self._answers: dict[int, Any] = {}
        self._places: list[Place] = [Place(0)] * readers  # after the last answer that arrived
        self._owner = os.getpid()
        self._is_closed = False
        self._workers: list[Worker] = []
        self._limits = Limits(depth)
        self._board = Board(readers, 0)
        # Runs before multiprocessing's own end, which would wait for ever for workers that ignore SIGTERM.
        self._at_exit = util.Finalize(None, self.close, exitpriority=100)
        try:
            for index in range(readers):
                self._workers.append(self._start(index))
        except BaseException:
            self.close()
            raise

    def send(self, reader: int, task: Task) -> int:
        """Gives a task to a reader; returns its number."""
        self._number += 1
        self._owed[self._number] = (reader, task)
        self._workers[reader].send((self._number, task, (), 0))
        return self._number

    def is_here(self, number: int) -> bool:
        """Whether a task is done."""
        return number in self._answers

    def wait(self, number: int) -> Given:
        """Samples and answer of a task, once.

        Raises:
            DataError: The stream failed, its worker died too often, or it took longer than the timeout.
        """
        given, error, answer = self._arrived(number)
        reader, _ = self._owed.pop(number)
        if error is not None:
            message, text = error
            raise DataError(f"{message} ({self._describe(reader)})") from WorkerError(text)
        if answer.is_whole:
            self._limits.check(given)
            return given, answer
        return (None if given is None else pickle.loads(given)), answer

    def clear(self) -> None:
        """What was given is not wanted any more. The next task of each reader has a place."""
        with self._changed:
            self._board.floor = self._number + 1
            self._answers.clear()
        self._owed.clear()
        self._replaced.clear()
        self._deaths.clear()

    def close(self) -> None:
        """Ends all workers; those that do not end by themselves within a moment are killed. Idempotent."""
        if self._is_closed or os.getpid() != self._owner:
            return
        self._is_closed = True
        self._at_exit.cancel()
        for worker in self._workers:
            worker.send(None)
        deadline = time.monotonic() + GRACE_SECONDS
        for worker in self._workers:
            worker.end(deadline)
        self._answers.clear()

    @property
    def pids(self) -> list[int]:
        """Process ids of the workers."""
        return [worker.pid for worker in self._workers]

    def _start(self, index: int) -> Worker:
        return Worker(
            self._fetch, index, self.readers, self._board, self._choose_method(), self._receive, None,
            self._device_index, self._timeout_seconds,
        )  # fmt: skip

    def _receive(self, worker: Worker, arrived: Any) -> None:
        """Takes an answer, or none where there will be no more. Runs in the worker's thread."""
        with self._changed:
            if arrived is not None and arrived[0] >= self._board.floor and not worker.is_given_up:
                number, _, error, answer = arrived
                self._answers[number] = arrived[1:]
                if error is None:
                    reader, task = self._owed[number]
                    self._places[reader] = after(self._places[reader], task, answer)
            self._changed.notify()

    # -- waiting -----------------------------------------------------------------------------------------------------

    def _arrived(self, number: int) -> Any:
        reader, _ = self._owed[number]
        began = time.monotonic()
        while True:
            with self._changed:
                if number in self._answers:
                    return self._answers.pop(number)
                if not self._workers[reader].is_lost():
                    waited = time.monotonic() - began
                    if waited >= self._timeout_seconds:
                        break
                    self._changed.wait(min(LOOK_SECONDS, self._timeout_seconds - waited))
                    continue
            self._replace(reader)
            began = time.monotonic()
        message = (
            f"{self._name}: no batch for {waited:.0f} s (loader.timeout={self._timeout_seconds:g}s). "
            f"{self._describe(reader)} has not finished {self._what(number)}. Raise loader.timeout if its samples are "
            "that slow; otherwise look at what their loading waits for: its stack is on stderr."
        )
        self._workers[reader].dump_stack()
        time.sleep(DUMP_SECONDS)
        raise DataError(message)

    def _replace(self, reader: int) -> None:
        """Starts another worker in the place of a dead one, and sends it what that one still owed.

        Raises:
            DataError: There were too many already.
        """
        worker = self._workers[reader]
        worker.bury()
        if worker.failure:
            raise DataError(f"{self._name}: {self._describe(reader)}: {worker.failure}")
        owed = [number for number, (who, _) in self._owed.items() if who == reader and number not in self._answers]
        due = self._board.working[reader]  # not always the first that it owes: those may have been on their way
        epoch = self._owed[owed[0] if owed else next(iter(self._owed))][1].epoch
        what = f"{self._name}: {self._describe(reader)} {how_it_ended(worker.exitcode)}"
        if due in self._owed:
            self._deaths[due] += 1
            what = f"{what} while it had to load {self._what(due)}"
        if self._replaced[epoch] >= self._worker_restarts or self._deaths[due] >= MOST_DEATHS:
            again = self._deaths[due] > 1 and f" It is worker {self._deaths[due]} in a row to die over them."
            most = f" loader.worker_restarts={self._worker_restarts} per epoch are used up." * (not again)
            raise DataError(f"{what}.{again or most} {worker.hint()}")
        self._replaced[epoch] += 1
        self.restarts += 1
        log.warning(
            "%s. It is replaced (%d of %d per epoch); no sample is lost or comes twice. %s",
            what, self._replaced[epoch], self._worker_restarts, worker.hint(),
        )  # fmt: skip
        self._workers[reader] = self._start(reader)
        for number in owed:
            _, task = self._owed[number]
            if number == owed[0] and task.place is None:
                task = task._replace(place=self._places[reader])
                self._owed[number] = (reader, task)
            self._workers[reader].send((number, task, (), 0))

    def _describe(self, reader: int) -> str:
        return f"loader worker {reader} of {self.readers}, pid {self._workers[reader].pid}"

    def _what(self, number: int) -> str:
        reader, task = self._owed[number]
        taken = (task.place or self._places[reader]).taken
        return f"{task.samples} samples of epoch {task.epoch} (it gave {taken} of its samples before)"


Source = InProcess | Workers


def sent_to_all(source: Source, tasks: Sequence[Task]) -> list[Answer]:
    """The answers of all readers to a task each."""
    numbers = [source.send(reader, task) for reader, task in enumerate(tasks)]
    return [source.wait(number)[1] for number in numbers]
