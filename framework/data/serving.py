"""The life of a loader process: a token in, a batch out.

Guarantee: it ends with the process that started it, even if that is killed; it ignores the signals of a run, which its
parent answers; whatever loading raises is sent to the parent, never printed and forgotten.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import multiprocessing
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from multiprocessing import connection
from typing import Any

import torch
import torch.multiprocessing
from torch.utils.data._utils import worker as torch_worker

from framework.data.fetch import Fetcher
from framework.data.limits import hint
from framework.data.position import Token
from framework.data.receipt import Receipt
from framework.errors import DataError

RUN_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)  # what a scheduler sends to a whole process group
_PR_SET_PDEATHSIG = 1

IDLE = -1

Task = tuple[int, Token, list[Token], int]  # number, what to load, what comes later, smaller numbers are out of use
Answer = tuple[int, Any, tuple[str, str] | None, Receipt | None]  # number, batch, message and traceback, receipt


class Board:
    """A few numbers in memory that the processes of a pool share. Each has one writer, so there is no lock.

    Args:
        num_workers: How many workers there are.
        floor: See below.

    Attributes:
        working: Number of the task that each worker works on, or `IDLE`.
    """

    def __init__(self, num_workers: int, floor: int) -> None:
        context: Any = torch.multiprocessing.get_context("fork")  # type: ignore[no-untyped-call]
        self._floor = context.RawValue("q", floor)
        self.working = context.RawArray("q", [IDLE] * num_workers)

    @property
    def floor(self) -> int:
        """Tasks with a smaller number are not wanted any more."""
        return self._floor.value  # type: ignore[no-any-return]

    @floor.setter
    def floor(self, number: int) -> None:
        self._floor.value = number


def serve(
    socket: connection.Connection,
    inherited: list[connection.Connection],
    fetch: Fetcher,
    index: int,
    num_workers: int,
    board: Board,
    is_child_of_main: bool,
    init: Callable[[int], None] | None,
) -> None:
    """Answers tasks until the parent asks it to end or is gone.

    Args:
        socket: Tasks come from here and answers go there.
        inherited: Ends of sockets that are the parent's alone.
        fetch: Makes the batches.
        index: Of this worker.
        num_workers: How many there are.
        board: Shared by all of them.
        is_child_of_main: Whether it was forked by the parent's main thread.
        init: Called first, with the index.
    """
    _prepare_process(inherited, is_child_of_main)
    torch_worker._worker_info = torch_worker.WorkerInfo(
        id=index, num_workers=num_workers, seed=fetch.seed, dataset=fetch.dataset
    )  # what torch.utils.data.get_worker_info() returns: datasets ask for it
    failure = _failure_of(init, index)
    seen = board.floor
    try:
        while (task := socket.recv()) is not None:
            if board.floor != seen:
                seen = board.floor
                fetch.cancel()
            if task[0] >= seen:
                board.working[index] = task[0]
                if failure is not None:
                    socket.send((task[0], None, failure, None))
                    continue
                _answer(socket, fetch, task)
                board.working[index] = IDLE
    except (EOFError, ConnectionError):
        return  # the parent is gone


def _failure_of(init: Callable[[int], None] | None, index: int) -> tuple[str, str] | None:
    """Message and traceback of what `init` raised, if it did."""
    try:
        if init is not None:
            init(index)
    except Exception as error:
        return f"worker_init_fn failed: {type(error).__name__}: {error}", traceback.format_exc()
    return None


def _answer(socket: connection.Connection, fetch: Fetcher, task: Task) -> None:
    number, token, ahead, retired = task
    batch, error, receipt = None, None, None
    try:
        batch, receipt = fetch.serve(number, token, ahead, retired)
    except DataError as failure:
        error = (str(failure), traceback.format_exc())
    except BaseException as failure:  # SystemExit, say: the parent has to hear of it
        message = f"Loading the samples {fetch.describe(token)} was broken off by {failure!r}"
        error = (message, traceback.format_exc())
    try:
        socket.send((number, batch, error, receipt))
    except OSError:
        raise
    except Exception as failure:  # not picklable; nothing has been written
        message = f"The batch of the samples {fetch.describe(token)} cannot be sent from a worker process: {failure}"
        socket.send((number, None, (f"{message} {hint(failure)}".strip(), traceback.format_exc()), None))


def _prepare_process(inherited: list[connection.Connection], is_child_of_main: bool) -> None:
    if is_child_of_main and sys.platform == "linux":
        # Should the parent be gone already, the socket is closed and the first recv ends the worker.
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    else:  # the kernel's parent is the fork server, which lives as long as its children do
        threading.Thread(target=_end_with_parent, name="parent watch", daemon=True).start()
    for each in RUN_SIGNALS:
        signal.signal(each, signal.SIG_IGN)
    if sys.__stderr__ is not None:
        with contextlib.suppress(ValueError, OSError):  # it may be no file
            faulthandler.register(signal.SIGQUIT, file=sys.__stderr__)  # dump the stacks and go on, as the trainer does
    signal.pthread_sigmask(signal.SIG_UNBLOCK, RUN_SIGNALS)
    for socket in inherited:
        socket.close()
    torch.set_num_threads(1)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        connection.wait([parent.sentinel])
        os.kill(os.getpid(), signal.SIGKILL)
