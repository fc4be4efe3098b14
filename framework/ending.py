"""How a process ends while a thread of it is still in a call.

Guarantee: a thread that was started as a `Background` never turns the end of a program into an abort. Python takes a
thread away that comes back from a call while the interpreter is taken apart; out of C++ or Rust (gloo, the store of the
ranks, a copy of tensors, an object store) that aborts the process, and its exit code is lost. So a process with such a
thread ends without that, once every exit handler has run and everything printed is out, with the code its program gave.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import sys
import threading
import time
from collections.abc import Callable

from framework.errors import EXIT_ERROR

SOON_SECONDS = 0.5  # for threads that are about to end anyway
PATIENCE_SECONDS = 5.0  # where the exit code is not known, and only the threads' own bounds help
_codes: list[int] = []


class Background(threading.Thread):
    """A thread that nobody needs to wait for, and that may hang in a call.

    Args:
        work: What it does.
        name: For stack dumps.
    """

    def __init__(self, work: Callable[[], object], name: str) -> None:
        super().__init__(target=work, name=name, daemon=True)


def exits_with(code: int) -> int:
    """Says with which code this program is about to end; returns it."""
    _codes[:] = [code]
    return code


def _end() -> None:
    """The last exit handler. A program that ends with a traceback need not have said its code."""
    if (processes := sys.modules.get("multiprocessing.util")) is not None:
        processes._exit_function()  # not later, as where torch was there first: threads wait for what it ends
    code = _codes[-1] if _codes else EXIT_ERROR if hasattr(sys, "last_value") else None
    if _have_ended(PATIENCE_SECONDS if code is None else SOON_SECONDS) or code is None:
        return
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, OSError, ValueError):  # closed, or none at all
            stream.flush()
    os._exit(code)


def _have_ended(seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    threads = [thread for thread in threading.enumerate() if isinstance(thread, Background)]
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    return not any(thread.is_alive() for thread in threads)


atexit.register(_end)  # handlers run in the opposite order: all that come later run before it
