"""Processes that load batches ahead.

Guarantee: batches come in the order of their tokens, whatever the number of workers. Every wait is bounded. A worker
that dies, or takes too long, is an error that names it, and its samples. No worker outlives the process that started
it, even if that is killed; a signal to the whole process group stops no worker before its parent closes it.

Each worker has a socket of its own: no lock is shared, so that one that is killed in the middle of a write cannot block
another, and its end is noticed at once, without a SIGCHLD handler that raises in the middle of a training step.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import itertools
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from multiprocessing import connection, resource_tracker, util
from typing import Any

import torch
import torch.multiprocessing
from torch.utils.data._utils import worker as torch_worker

from framework.data.fetch import Fetcher, pin
from framework.data.position import Token
from framework.errors import DataError

GRACE_SECONDS = 2.0  # for a worker to end by itself once it is asked to
LOOK_SECONDS = 1.0  # between two looks at the workers while waiting for a batch

_RUN_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)  # what a scheduler sends to a whole process group
_PR_SET_PDEATHSIG = 1
_HINTS = {
    signal.SIGBUS: "Shared memory is full: enlarge /dev/shm, or lower loader.num_workers or loader.prefetch_factor.",
    signal.SIGKILL: "It was killed from outside, most often for lack of memory: lower loader.num_workers.",
}


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
        num_workers: Number of processes, at least 1.
        prefetch_factor: Batches that each worker prepares ahead, at least 1.
        timeout_seconds: Longest wait for a batch.
        method: Start method: `fork` or `forkserver` (then the dataset and the collate function are pickled).
        is_pinned: Whether batches come in page-locked memory.
        name: Who waits, for error messages.

    Raises:
        DataError: The dataset or the collate function cannot be sent to a worker.
    """

    def __init__(
        self,
        fetch: Fetcher,
        *,
        num_workers: int,
        prefetch_factor: int,
        timeout_seconds: float,
        method: str,
        is_pinned: bool,
        name: str,
    ) -> None:
        self._fetch = fetch
        self._depth = num_workers * prefetch_factor
        self._timeout_seconds = timeout_seconds
        self._is_pinned = is_pinned
        self._name = name
        self._tokens: Iterator[Token] = iter(())
        self._sent: dict[int, Token] = {}  # what the workers owe, by number; the worker of a number is number % workers
        self._next_number = 0
        self._changed = threading.Condition()  # guards the two below, which the receiver fills
        self._batches: dict[int, tuple[Any, tuple[str, str] | None]] = {}
        self._broken: dict[int, str] = {}
        self._owner = os.getpid()
        self._is_closed = False
        self._workers: list[Any] = []
        self._sockets: list[connection.Connection] = []
        context: Any = torch.multiprocessing.get_context(method)
        self._floor = context.RawValue("q", 0)  # what has a smaller number is not wanted any more
        # Runs before multiprocessing's own end, which would wait for ever for workers that ignore SIGTERM.
        self._at_exit = util.Finalize(None, self.close, exitpriority=100)
        try:
            self._start(context, num_workers, method)
        except BaseException:
            self.close()
            raise
        self._device_index = torch.accelerator.current_device_index() if is_pinned else 0
        self._receiver = threading.Thread(target=self._receive, name="loader receiver", daemon=True)
        self._receiver.start()

    def restart(self, tokens: Iterator[Token]) -> None:
        """Drops everything that was prefetched and goes on with other tokens, in the same processes."""
        with self._changed:
            self._floor.value = self._next_number
            self._batches.clear()
        self._sent.clear()
        self._tokens = tokens
        for token in itertools.islice(tokens, self._depth):
            self._send(token)

    def next(self) -> Any:
        """The batch of the next token.

        Raises:
            StopIteration: There are no more tokens.
            DataError: The sample could not be loaded, its worker died, or it took longer than the timeout.
        """
        if not self._sent:
            raise StopIteration
        number = next(iter(self._sent))
        batch, error = self._wait(number)
        del self._sent[number]
        if error is not None:
            message, text = error
            raise DataError(f"{message} ({self._worker(number)})") from WorkerError(text)
        for token in itertools.islice(self._tokens, 1):
            self._send(token)
        return batch

    def close(self) -> None:
        """Ends all workers; those that do not end by themselves within `GRACE_SECONDS` are killed. Idempotent."""
        if self._is_closed or os.getpid() != self._owner:
            return
        self._is_closed = True
        self._at_exit.cancel()
        for socket in self._sockets:
            with contextlib.suppress(OSError):  # this one is dead already
                socket.send(None)
        deadline = time.monotonic() + GRACE_SECONDS
        for worker in self._workers:
            worker.join(max(0.0, deadline - time.monotonic()))
            if worker.exitcode is None:
                worker.kill()
                worker.join(GRACE_SECONDS)
        receiver = getattr(self, "_receiver", None)
        if receiver is not None:
            receiver.join(GRACE_SECONDS)
        for socket in self._sockets:
            socket.close()
        self._sent.clear()
        self._batches.clear()

    def _start(self, context: Any, num_workers: int, method: str) -> None:
        is_forked = method == "fork"
        if not is_forked:
            context.set_forkserver_preload(["framework.data.workers"])
            resource_tracker.ensure_running()  # else it starts below, and unblocks the signals
        # A blocked signal stays blocked in what is started here (and in the fork server, for its whole life) until the
        # worker ignores it: there is no moment in which it could end one.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _RUN_SIGNALS)
        try:
            for index in range(num_workers):
                ours, theirs = context.Pipe()
                self._sockets.append(ours)
                # A forked worker holds copies of our ends; unless it closes them no worker would notice that we died.
                inherited = list(self._sockets) if is_forked else []
                # The kernel's parent-death signal follows the thread that forks: only a main thread may rely on it.
                is_child_of_main = is_forked and threading.current_thread() is threading.main_thread()
                worker = context.Process(
                    target=_serve,
                    args=(theirs, inherited, self._fetch, index, num_workers, self._floor, is_child_of_main),
                    name=f"loader worker {index}",
                    daemon=True,
                )
                try:
                    worker.start()
                except (TypeError, AttributeError, ValueError, ModuleNotFoundError, pickle.PicklingError) as error:
                    raise DataError(
                        f"{type(self._fetch.dataset).__name__} and its collate function cannot be sent to a worker "
                        f"process: {error}. With CUDA in use workers are started anew, so both must be picklable: move "
                        "lambdas and local functions to a module, or set loader.num_workers=0."
                    ) from error
                finally:
                    theirs.close()
                self._workers.append(worker)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def _send(self, token: Token) -> None:
        number = self._next_number
        self._next_number += 1
        self._sent[number] = token
        with contextlib.suppress(OSError):  # the worker is dead: the wait for this number says so
            self._sockets[number % len(self._sockets)].send((number, token))

    def _wait(self, number: int) -> tuple[Any, tuple[str, str] | None]:
        began = time.monotonic()
        with self._changed:
            while number not in self._batches:
                self._raise_if_broken(number)
                waited = time.monotonic() - began
                if waited >= self._timeout_seconds:
                    raise DataError(
                        f"{self._name}: no batch for {waited:.0f} s (loader.timeout={self._timeout_seconds:g}s). "
                        f"{self._worker(number)} has not finished the samples {self._samples(number)}. Raise "
                        "loader.timeout if they are that slow; otherwise look at what their loading waits for."
                    )
                self._changed.wait(min(LOOK_SECONDS, self._timeout_seconds - waited))
            return self._batches.pop(number)

    def _raise_if_broken(self, number: int) -> None:
        index = number % len(self._workers)
        worker = self._workers[index]
        if not worker.is_alive() and not self._sockets[index].poll(0):
            self._broken.setdefault(index, "")  # a process that it started itself may hold its socket open
        if index in self._broken:
            worker.join(LOOK_SECONDS)  # it closed its socket: the exit code follows
            raise DataError(
                f"{self._name}: {self._worker(number)} {_how_it_ended(worker.exitcode)} while it had to load the samples "
                f"{self._samples(number)}. {self._broken[index]}{_hint(worker.exitcode)}"
            )

    def _worker(self, number: int) -> str:
        index = number % len(self._workers)
        return f"loader worker {index} of {len(self._workers)}, pid {self._workers[index].pid}"

    def _samples(self, number: int) -> str:
        token = self._sent[number]
        return f"{self._fetch.describe(token)} (from position {token.start})"

    def _receive(self) -> None:
        """Takes batches from all workers until every one has closed its end. Runs in a thread."""
        if self._is_pinned:
            torch.accelerator.set_device_index(self._device_index)
        indices = {socket: index for index, socket in enumerate(self._sockets)}
        while indices:
            for socket in connection.wait(list(indices)):
                assert isinstance(socket, connection.Connection)
                reason = self._receive_one(socket)
                if reason is not None:
                    index = indices.pop(socket)
                    with self._changed:
                        self._broken[index] = reason
                        self._changed.notify()

    def _receive_one(self, socket: connection.Connection) -> str | None:
        """Takes one batch. Returns why there will be no more from this worker, or none."""
        try:
            number, batch, error = socket.recv()
            if number < self._floor.value:
                return None
            if self._is_pinned and error is None:
                batch = pin(batch)
        except (EOFError, ConnectionError):
            return ""
        except Exception as failure:  # whatever it is, the step loop has to hear of it
            return f"Its batch could not be received: {type(failure).__name__}: {failure}. "
        with self._changed:
            if number >= self._floor.value:
                self._batches[number] = (batch, error)
                self._changed.notify()
        return None


def _how_it_ended(exitcode: int | None) -> str:
    if exitcode is None:
        return "stopped answering"
    if exitcode < 0:
        return f"was ended by signal {signal.Signals(-exitcode).name}"
    return f"ended by itself with exit code {exitcode}"


def _hint(exitcode: int | None) -> str:
    default = "Look for its own message above; loader.num_workers=0 loads in this process and shows the error."
    return _HINTS.get(-exitcode, default) if exitcode is not None else default  # type: ignore[call-overload,no-any-return]


def _serve(
    socket: connection.Connection,
    inherited: list[connection.Connection],
    fetch: Fetcher,
    index: int,
    num_workers: int,
    floor: Any,
    is_child_of_main: bool,
) -> None:
    """The life of a worker: token in, batch out, until the parent asks it to end or is gone."""
    _prepare_process(inherited, is_child_of_main)
    torch_worker._worker_info = torch_worker.WorkerInfo(
        id=index, num_workers=num_workers, seed=fetch.seed, dataset=fetch.dataset
    )  # what torch.utils.data.get_worker_info() returns: datasets ask for it
    try:
        while (task := socket.recv()) is not None:
            number, token = task
            if number >= floor.value:
                _answer(socket, number, fetch, token)
    except (EOFError, ConnectionError):
        return  # the parent is gone


def _answer(socket: connection.Connection, number: int, fetch: Fetcher, token: Token) -> None:
    batch, error = None, None
    try:
        batch = fetch(token)
    except DataError as failure:
        error = (str(failure), traceback.format_exc())
    except BaseException as failure:  # SystemExit, say: the parent has to hear of it
        message = f"Loading the samples {fetch.describe(token)} was broken off by {failure!r}"
        error = (message, traceback.format_exc())
    try:
        socket.send((number, batch, error))
    except OSError:
        raise
    except Exception as failure:  # not picklable; nothing has been written
        message = f"The batch of the samples {fetch.describe(token)} cannot be sent from a worker process: {failure}"
        socket.send((number, None, (message, traceback.format_exc())))


def _prepare_process(inherited: list[connection.Connection], is_child_of_main: bool) -> None:
    if is_child_of_main and sys.platform == "linux":
        # Should the parent be gone already, the socket is closed and the first recv ends the worker.
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    else:  # the kernel's parent is the fork server, which lives as long as its children do
        threading.Thread(target=_end_with_parent, name="parent watch", daemon=True).start()
    for each in _RUN_SIGNALS:
        signal.signal(each, signal.SIG_IGN)
    if sys.__stderr__ is not None:
        with contextlib.suppress(ValueError, OSError):  # it may be no file
            faulthandler.register(signal.SIGQUIT, file=sys.__stderr__)  # dump the stacks and go on, as the trainer does
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _RUN_SIGNALS)
    for socket in inherited:
        socket.close()
    torch.set_num_threads(1)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        connection.wait([parent.sentinel])
        os.kill(os.getpid(), signal.SIGKILL)
