"""Processes that load batches ahead.

Guarantee: batches come in the order of their tokens, whatever the number of workers. Every wait is bounded. A worker
that dies is replaced by one that loads what it still owed, no batch missing and none twice; one that dies too often, or
takes too long, is an error that names it, and its samples. No worker outlives the process that started it, even if that
is killed; a signal to the whole process group stops no worker before its parent closes it.

Each worker has a socket of its own: no lock is shared, so that one that is killed in the middle of a write cannot block
another, and its end is noticed at once, without a SIGCHLD handler that raises in the middle of a training step.
"""

from __future__ import annotations

import itertools
import logging
import os
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from multiprocessing import util
from typing import Any

import torch

from framework.data.delivery import Delivery
from framework.data.fetch import Fetcher
from framework.data.limits import Limits
from framework.data.position import Token
from framework.data.process import GRACE_SECONDS, Worker, how_it_ended
from framework.data.serving import Board
from framework.errors import DataError

LOOK_SECONDS = 1.0  # between two looks at the workers while waiting for a batch
DUMP_SECONDS = 0.5  # for a worker to write its stack
MOST_DEATHS = 3  # of workers over one batch: it is the batch then

log = logging.getLogger(__name__)


class WorkerError(Exception):
    """The traceback in a worker, as text: the cause of the error that is raised here."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text

    def __str__(self) -> str:
        return f"\n\n{self.text}"


class WorkerPool:
    """Worker processes that turn a stream of tokens into a stream of batches. Not thread-safe.

    Args:
        fetch: What each worker runs.
        delivery: The books of what is handed out.
        samples: Length of an epoch.
        num_workers: Number of processes, at least 1.
        prefetch_factor: Batches that each worker prepares ahead, at least 1.
        look_ahead: Batches beyond those that each worker is told of, so that it can fetch their files.
        timeout_seconds: Longest wait for a batch.
        choose_method: Gives the start method of a worker that starts now: `fork` or `forkserver` (then the dataset and
            the collate function are pickled).
        worker_restarts: How many workers that die are replaced per epoch.
        is_pinned: Whether batches come in page-locked memory.
        name: Who waits, for error messages.
        init: Called first in each worker, with its index.

    Raises:
        DataError: The dataset or the collate function cannot be sent to a worker.
    """

    def __init__(
        self,
        fetch: Fetcher,
        delivery: Delivery,
        *,
        samples: int,
        num_workers: int,
        prefetch_factor: int,
        look_ahead: int,
        timeout_seconds: float,
        choose_method: Callable[[], str],
        worker_restarts: int,
        is_pinned: bool,
        name: str,
        init: Callable[[int], None] | None = None,
    ) -> None:
        self._fetch = fetch
        self._delivery = delivery
        self._samples_per_epoch = samples
        self._num_workers = num_workers
        self._depth = num_workers * prefetch_factor
        self._look_ahead = look_ahead
        self._timeout_seconds = timeout_seconds
        self._choose_method = choose_method
        self._worker_restarts = worker_restarts
        self._is_pinned = is_pinned
        self._name = name
        self._init = init
        self._tokens: Iterator[Token] = iter(())
        self._upcoming: deque[Token] = deque()  # read from the tokens, announced perhaps, and not sent yet
        self._sent: dict[int, Token] = {}  # what the workers owe, by number; the worker of a number is number % workers
        self._next_number = delivery.number
        self._restarts: Counter[int] = Counter()  # by epoch
        self._deaths: Counter[int] = Counter()  # by number of the batch that was due
        self._changed = threading.Condition()  # guards the one below, which the receivers fill
        self._batches: dict[int, Any] = {}
        self._owner = os.getpid()
        self._is_closed = False
        self._workers: list[Worker] = []
        self._device_index = torch.accelerator.current_device_index() if is_pinned else None
        self._limits = Limits(self._depth)
        self._board = Board(num_workers, self._next_number)
        # Runs before multiprocessing's own end, which would wait for ever for workers that ignore SIGTERM.
        self._at_exit = util.Finalize(None, self.close, exitpriority=100)
        try:
            for index in range(num_workers):
                self._workers.append(self._start(index))
        except BaseException:
            self.close()
            raise

    def restart(self, tokens: Iterator[Token]) -> None:
        """Drops everything that was prefetched and goes on with other tokens, in the same processes."""
        with self._changed:
            self._board.floor = self._next_number
            self._batches.clear()
        self._sent.clear()
        self._restarts.clear()
        self._deaths.clear()
        self._delivery.begin(self._next_number)
        self._tokens = tokens
        workers, look_ahead = self._num_workers, self._look_ahead
        self._upcoming = deque(itertools.islice(tokens, self._depth + look_ahead * workers))
        announced = [list(self._upcoming)[k::workers] if look_ahead else [] for k in range(workers)]
        for place in range(min(self._depth, len(self._upcoming))):
            self._send_next(announced[place] if place < workers else [])

    def next(self) -> Any:
        """The batch of the next token.

        Raises:
            StopIteration: There are no more tokens.
            DataError: The sample could not be loaded, its worker died too often, or it took longer than the timeout.
        """
        if not self._sent:
            raise StopIteration
        number = next(iter(self._sent))
        batch, error, receipt = self._wait(number)
        token = self._sent.pop(number)
        if error is not None:
            message, text = error
            raise DataError(f"{message} ({self._worker(number)})") from WorkerError(text)
        self._delivery.hand_out(number, token, receipt)
        self._limits.check(batch)
        further = next(self._tokens, None)
        if further is not None:
            self._upcoming.append(further)
        if self._upcoming:  # the one that is `look_ahead` further ahead is the same worker's
            self._send_next([further] if self._look_ahead and further is not None else [])
        return batch

    def is_ready(self) -> bool:
        """Whether the next batch is here, so that `next` would not wait."""
        with self._changed:
            return next(iter(self._sent), None) in self._batches

    def close(self) -> None:
        """Ends all workers; those that do not end by themselves within `GRACE_SECONDS` are killed. Idempotent."""
        if self._is_closed or os.getpid() != self._owner:
            return
        self._is_closed = True
        self._at_exit.cancel()
        for worker in self._workers:
            worker.send(None)
        deadline = time.monotonic() + GRACE_SECONDS
        for worker in self._workers:
            worker.end(deadline)
        self._sent.clear()
        self._batches.clear()

    @property
    def pids(self) -> list[int]:
        """Process ids of the workers."""
        return [worker.pid for worker in self._workers]

    def _start(self, index: int) -> Worker:
        return Worker(
            self._fetch, index, self._num_workers, self._board, self._choose_method(), self._receive, self._init,
            self._device_index, self._timeout_seconds,
        )  # fmt: skip

    def _send_next(self, ahead: list[Token]) -> None:
        token = self._upcoming.popleft()
        number = self._next_number
        self._next_number += 1
        self._sent[number] = token
        self._workers[number % self._num_workers].send((number, token, ahead, self._delivery.retired))

    def _receive(self, worker: Worker, answer: Any) -> None:
        """Takes an answer, or none where there will be no more. Runs in the worker's thread."""
        with self._changed:
            if answer is not None and answer[0] >= self._board.floor and not worker.is_given_up:
                self._batches[answer[0]] = answer[1:]
            self._changed.notify()

    # -- waiting -----------------------------------------------------------------------------------------------------

    def _wait(self, number: int) -> Any:
        index = number % self._num_workers
        began = time.monotonic()
        while True:
            with self._changed:
                if number in self._batches:
                    return self._batches.pop(number)
                if not self._workers[index].is_lost():
                    waited = time.monotonic() - began
                    if waited >= self._timeout_seconds:
                        break
                    self._changed.wait(min(LOOK_SECONDS, self._timeout_seconds - waited))
                    continue
            self._replace(index)
            began = time.monotonic()
        worker = self._workers[index]
        message = (
            f"{self._name}: no batch for {waited:.0f} s (loader.timeout={self._timeout_seconds:g}s). "
            f"{self._worker(number)} has not finished the samples {self._samples(number)}. Raise loader.timeout if they "
            "are that slow; otherwise look at what their loading waits for: its stack is on stderr."
        )
        worker.dump_stack()
        time.sleep(DUMP_SECONDS)
        raise DataError(message)

    def _replace(self, index: int) -> None:
        """Starts another worker in the place of a dead one, and sends it what that one still owed.

        Raises:
            DataError: There were too many already.
        """
        worker = self._workers[index]
        worker.bury()
        if worker.failure:
            raise DataError(f"{self._name}: {self._describe(index)}: {worker.failure}")
        owed = [n for n in self._sent if n % self._num_workers == index and n not in self._batches]
        due = self._board.working[index]  # not always the first that it owes: those may have been on their way
        epoch = self._sent[owed[0] if owed else next(iter(self._sent))].start // self._samples_per_epoch
        what = f"{self._name}: {self._describe(index)} {how_it_ended(worker.exitcode)}"
        if due in self._sent:
            self._deaths[due] += 1
            what = f"{what} while it had to load the samples {self._samples(due)}"
        else:
            what = f"{what} when it had nothing to do" + (
                f" but send the samples {self._samples(owed[0])}" if owed else ""
            )
        if self._restarts[epoch] >= self._worker_restarts or self._deaths[due] >= MOST_DEATHS:
            again = self._deaths[due] > 1 and f" It is worker {self._deaths[due]} in a row to die over them."
            most = f" loader.worker_restarts={self._worker_restarts} per epoch are used up." * (not again)
            raise DataError(f"{what}.{again or most} {worker.hint()}")
        self._restarts[epoch] += 1
        self._delivery.stats.worker_restarts += 1
        log.warning(
            "%s. It is replaced (%d of %d per epoch); no sample is lost or comes twice. %s",
            what, self._restarts[epoch], self._worker_restarts, worker.hint(),
        )  # fmt: skip
        self._workers[index] = self._start(index)
        upcoming = enumerate(self._upcoming, start=self._next_number)
        ahead = [self._sent[n] for n in owed] + [t for n, t in upcoming if n % self._num_workers == index]
        for place, number in enumerate(owed):
            announced = ahead if self._look_ahead and place == 0 else []
            self._workers[index].send((number, self._sent[number], announced, self._delivery.retired))

    def _worker(self, number: int) -> str:
        return self._describe(number % self._num_workers)

    def _describe(self, index: int) -> str:
        return f"loader worker {index} of {self._num_workers}, pid {self._workers[index].pid}"

    def _samples(self, number: int) -> str:
        token = self._sent[number]
        return f"{self._fetch.describe(token)} (from position {token.start})"
