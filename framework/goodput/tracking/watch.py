"""Watches over the exporter: whether its parent lives, whether the server answers, whether its time is up.

Guarantee: an outage is told in one line within 10 s, also while a call of MLflow hangs, and the process ends within
the linger time (and a grace of 5 s) after its parent, whatever hangs.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Iterator
from types import TracebackType
from typing import IO

import psutil

WARN_AFTER_SECONDS = 5.0
FILE_SECONDS = 60.0  # making the tables of a local file takes a niced process that long on a machine that is busy
GRACE_SECONDS = 5.0


class Watch:
    """A thread beside the exporter's own.

    Args:
        uri: Address of the server, for messages.
        parent: Process id of the training process, none if there is none to wait for.
        linger_seconds: How long to go on after the parent has ended; without a parent, how long to bear an outage.
        console: Where warnings go; default stderr.
    """

    def __init__(self, uri: str, parent: int | None, linger_seconds: float, console: IO[str] | None = None) -> None:
        self.parent = parent
        self._uri = uri
        self._is_file = uri.startswith("sqlite:")
        self._linger = linger_seconds
        self._console = console or sys.stderr
        self._process = process_of(parent)
        self._gone_at: float | None = None
        self._busy_since: float | None = None
        self._failing_since: float | None = None
        self._error: str = ""
        self._has_warned = False
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watch", daemon=True)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join(timeout=5)
        if self._failing_since is not None and self._gone_at is not None:
            self._leave()

    def parent_is_gone(self) -> bool:
        """Whether the training process has ended (or there is none)."""
        if self._gone_at is None and not is_alive(self._process):
            self._gone_at = time.monotonic()
        return self._gone_at is not None

    @property
    def is_failing(self) -> bool:
        """Whether the last call failed."""
        return self._failing_since is not None

    def is_time_up(self) -> bool:
        return self._overdue() > 0

    def _overdue(self) -> float:
        """Seconds since the time was up, negative before."""
        if not self.parent_is_gone():
            return -1.0
        since = self._gone_at if self.parent is not None else self._failing_since or self._busy_since
        return -1.0 if since is None else time.monotonic() - since - self._linger

    def pause(self, seconds: float) -> None:
        """Waits, but not longer than until the parent ends."""
        deadline = time.monotonic() + seconds
        was_gone = self.parent_is_gone()
        while time.monotonic() < deadline and (was_gone or not self.parent_is_gone()):
            time.sleep(0.1)

    @contextlib.contextmanager
    def call(self) -> Iterator[None]:
        """Around calls of MLflow: if they neither return nor fail for a while, that is said."""
        self._busy_since = time.monotonic()
        try:
            yield
        finally:
            self._busy_since = None
        if self._failing_since is not None:
            print(f"{_clock()} {self._uri} answers again", flush=True)
        self._failing_since, self._has_warned, self._error = None, False, ""

    def alive(self) -> None:
        """Something went forward inside a call."""
        self._busy_since = time.monotonic()

    def failed(self, error: BaseException) -> None:
        """A call failed; it will be tried again."""
        self._error = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        self._failing_since = self._failing_since or time.monotonic()
        print(f"{_clock()} {self._error}", flush=True)

    def _watch(self) -> None:
        while not self._stop.wait(0.25):
            since = self._failing_since or self._busy_since
            patience = FILE_SECONDS if self._is_file and self._failing_since is None else WARN_AFTER_SECONDS
            if since is not None and not self._has_warned and time.monotonic() - since > patience:
                self._has_warned = True
                reason = self._error or f"no answer for {patience:.0f} s"
                self._say(
                    f"warning: MLflow at {self._uri} is not available ({reason}). Training goes on; everything is kept "
                    f"in the run's events/ and is sent as soon as it is back."
                )
            if self._overdue() > GRACE_SECONDS:
                self._leave()
                os._exit(1)  # a call of MLflow hangs; nothing is lost, the journal and mlflow.json are complete

    def _leave(self) -> None:
        self._say(
            f"warning: not everything has reached MLflow at {self._uri} ({self._error or 'it does not answer'}). "
            f"Send the rest later with: python -m framework.goodput export RUN --mlflow"
        )

    def _say(self, line: str) -> None:
        print(f"{_clock()} {line}", flush=True)
        with contextlib.suppress(OSError, ValueError):  # nobody may be listening any more
            print(line, file=self._console, flush=True)


def _clock() -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S")


def process_of(pid: int | None) -> psutil.Process | None:
    """The process with this id, none if there is none."""
    try:
        return None if pid is None else psutil.Process(pid)
    except psutil.NoSuchProcess:
        return None


def is_alive(process: psutil.Process | None) -> bool:
    """Whether it runs; a zombie does not."""
    try:
        return process is not None and process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
