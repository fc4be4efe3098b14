"""One loader process as its parent sees it: the process, the socket to it, and the thread that listens there.

Guarantee: starting one moves no signal mask and draws no random number of the parent; burying one leaves no process, no
thread and no open file, and waits a bounded time, whatever the process does.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import socket as sockets
import struct
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from multiprocessing import connection, resource_tracker
from typing import Any

import torch
import torch.multiprocessing

from framework.data.device import pin
from framework.data.fetch import Fetcher
from framework.data.limits import FULL
from framework.data.serving import RUN_SIGNALS, Board, serve
from framework.ending import Background
from framework.errors import DataError

GRACE_SECONDS = 2.0  # for a worker to end by itself once it is asked to

_HINTS = {
    signal.SIGBUS: FULL,
    signal.SIGKILL: "It was killed from outside, most often for lack of memory: lower loader.num_workers.",
}
_OURS: weakref.WeakSet[connection.Connection] = weakref.WeakSet()  # our ends of all sockets to workers


class Worker:
    """A loader process.

    Args:
        fetch: What it runs.
        index: Its number.
        num_workers: How many there are.
        board: Shared by all of them.
        method: Start method: `fork` or `forkserver`.
        receive: Called in a thread with each answer, and once with none when there will be no more.
        init: Called first in the process, with `index`.
        device_index: Of the accelerator that batches are page-locked for, or none.
        timeout_seconds: Longest wait for room for a task in its socket.

    Attributes:
        pid: Its process id.
        exitcode: How it ended, as multiprocessing says it; known once it is buried.
        is_given_up: Whether its answers are of no use any more.
        failure: Why an answer of the living worker could not be read, if that happened.

    Raises:
        DataError: The dataset or the collate function cannot be sent to it, or there can be no more processes.
    """

    def __init__(
        self, fetch: Fetcher, index: int, num_workers: int, board: Board, method: str,
        receive: Callable[[Worker, Any], None], init: Callable[[int], None] | None, device_index: int | None,
        timeout_seconds: float = 600.0,
    ) -> None:  # fmt: skip
        self.exitcode: int | None = None
        self.is_given_up = False
        self.failure = ""
        self._receive = receive
        self._device_index = device_index
        self._is_closed = False  # it closed its end of the socket
        self._is_buried = False
        self._dead_since: float | None = None
        self._socket, self._process = _started(fetch, index, num_workers, board, method, init)
        self.pid: int = self._process.pid
        _bound_writes(self._socket, timeout_seconds)
        self._thread = Background(self._listen, f"loader receiver {index}")
        self._thread.start()

    def send(self, task: Any) -> None:
        """Sends a task; to a worker that is dead, or takes nothing in for too long, it is not sent."""
        with contextlib.suppress(OSError):
            self._socket.send(task)

    def is_lost(self) -> bool:
        """Whether there will be no more answers. A process that it started itself may hold its socket open, and the
        socket by which tensors are asked for, so that nothing tells the thread that listens."""
        if self._is_closed or self._process.is_alive():
            return self._is_closed
        self._dead_since = self._dead_since or time.monotonic()
        return not self._socket.poll(0) or time.monotonic() - self._dead_since > GRACE_SECONDS

    def hint(self) -> str:
        """What to do about its end."""
        default = "Look for its own message above; loader.num_workers=0 loads in this process and shows the error."
        return _HINTS.get(-(self.exitcode or 0), default)  # type: ignore[call-overload,no-any-return]

    def dump_stack(self) -> None:
        """Has it write the stacks of its threads to stderr."""
        if self._process.is_alive():
            os.kill(self.pid, signal.SIGQUIT)

    def bury(self) -> None:
        """Makes sure that it is dead, and takes in what it still sent. Idempotent."""
        if self._is_buried:
            return
        self._process.join(0 if self.failure else GRACE_SECONDS)  # it closed its socket: the exit code follows
        self._finish()

    def end(self, deadline: float) -> None:
        """Waits until it ended by itself, or kills it at `deadline` (of the monotonic clock). Idempotent."""
        self.is_given_up = True
        if self._is_buried:
            return
        self._process.join(max(0.0, deadline - time.monotonic()))
        self._finish()

    def _finish(self) -> None:
        if self._process.exitcode is None:
            self._process.kill()
            self._process.join(GRACE_SECONDS)
        self._thread.join(GRACE_SECONDS / 4)
        if self._thread.is_alive():  # somebody else holds the socket open
            with contextlib.suppress(OSError), sockets.socket(fileno=os.dup(self._socket.fileno())) as ours:
                ours.shutdown(sockets.SHUT_RDWR)
            self._thread.join(GRACE_SECONDS)
        self.is_given_up = self._is_buried = True
        self._socket.close()
        self.exitcode = self._process.exitcode
        if self.exitcode is not None and not self._thread.is_alive():
            self._process.close()  # its files at once, not when somebody collects it

    def _listen(self) -> None:
        """Takes answers until the worker has closed its end. Runs in a thread."""
        if self._device_index is not None:
            torch.accelerator.set_device_index(self._device_index)
        answer: Any = ()
        while answer is not None:
            answer = self._next()
            self._receive(self, answer)

    def _next(self) -> Any:
        try:
            number, batch, *rest = self._socket.recv()
            if self._device_index is not None:
                batch = pin(batch)
            return (number, batch, *rest)
        except (EOFError, ConnectionError):
            pass
        except Exception as failure:  # whatever it is, the step loop has to hear of it
            # The tensors of a dead worker's last batch cannot be had: it is the one that kept their files open.
            if not connection.wait([self._process.sentinel], GRACE_SECONDS):
                self.failure = f"its batch could not be received: {type(failure).__name__}: {failure}"
        self._is_closed = True
        return None


def _bound_writes(ours: connection.Connection, seconds: float) -> None:
    with sockets.socket(fileno=os.dup(ours.fileno())) as same:
        limit = struct.pack("ll", int(seconds), int(seconds % 1 * 1e6))
        same.setsockopt(sockets.SOL_SOCKET, sockets.SO_SNDTIMEO, limit)


def how_it_ended(exitcode: int | None) -> str:
    """The end of a process in words."""
    if exitcode is None:
        return "stopped answering"
    if exitcode < 0:
        return f"was ended by signal {signal.Signals(-exitcode).name}"
    return f"ended by itself with exit code {exitcode}"


def _started(
    fetch: Fetcher, index: int, num_workers: int, board: Board, method: str, init: Callable[[int], None] | None
) -> tuple[connection.Connection, Any]:
    context: Any = torch.multiprocessing.get_context(method)  # type: ignore[no-untyped-call]
    is_forked = method == "fork"
    with _run_signals_blocked(is_forked, context):
        ours, theirs = context.Pipe()
        _OURS.add(ours)
        # A forked worker holds copies of our ends; unless it closes them no worker would notice that we died.
        inherited = list(_OURS) if is_forked else []
        # The kernel's parent-death signal follows the thread that forks: only a main thread may rely on it.
        is_child_of_main = is_forked and threading.current_thread() is threading.main_thread()
        process = context.Process(
            target=serve,
            args=(theirs, inherited, fetch, index, num_workers, board, is_child_of_main, init),
            name=f"loader worker {index}",
            daemon=True,
        )
        try:
            process.start()
        except BaseException as error:
            ours.close()
            if isinstance(error, TypeError | AttributeError | ValueError | ModuleNotFoundError | pickle.PicklingError):
                raise DataError(
                    f"{type(fetch.dataset).__name__} and its collate function cannot be sent to a worker process: "
                    f"{error}. With CUDA in use workers are started anew, so both must be picklable: move lambdas and "
                    "local functions to a module, or set loader.num_workers=0."
                ) from error
            if isinstance(error, OSError):
                raise DataError(
                    f"Loader worker {index} of {num_workers} cannot be started: {error}. Lower loader.num_workers, or "
                    "allow this user more processes or memory."
                ) from error
            raise
        finally:
            theirs.close()
    return ours, process


@contextlib.contextmanager
def _run_signals_blocked(is_forked: bool, context: Any) -> Iterator[None]:
    """While workers start: a blocked signal stays blocked in what is started (and in the fork server, for its whole
    life) until the worker ignores it, so that there is no moment in which it could end one."""
    if not is_forked:
        context.set_forkserver_preload(["framework.data.process"])
        resource_tracker.ensure_running()  # else it starts below, and unblocks the signals
    before = signal.pthread_sigmask(signal.SIG_BLOCK, RUN_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
