"""A process beside a training process, which it outlives a little. Imports neither torch nor MLflow.

Guarantee: starting returns at once, and the wait at the end is bounded. The process holds none of the trainer's streams
open and is not reached by Ctrl-C.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO

import framework

_left_running: list[subprocess.Popen[str]] = []  # a process that lingers must not be reported as forgotten


class SideProcess:
    """Runs a module of this package.

    Args:
        module: Its name.
        arguments: Its command line, which everybody on the host can read.
        log: File to which its output is appended.
        environment: Variables to set for it.
        say: Called from a thread with each line that the user should see; default prints to stderr.
    """

    def __init__(
        self,
        module: str,
        arguments: Sequence[str],
        log: Path,
        *,
        environment: Mapping[str, str] | None = None,
        say: Callable[[str], None] | None = None,
    ) -> None:
        self._command = [sys.executable, "-P", "-W", "ignore", "-m", module, *arguments]
        self._log = log
        self._environment = dict(environment or {})
        self._say = say or (lambda line: print(line, file=sys.stderr, flush=True))
        self._process: subprocess.Popen[str] | None = None
        self._reader: threading.Thread | None = None

    @property
    def pid(self) -> int | None:
        """Its process id, none before `start`."""
        return None if self._process is None else self._process.pid

    def start(self) -> None:
        """Starts the process.

        Raises:
            OSError: The log cannot be written or the process cannot be started.
        """
        home = str(Path(framework.__file__).resolve().parent.parent)
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, [home, os.environ.get("PYTHONPATH")]))}
        environment |= {"PYTHONUNBUFFERED": "1"} | self._environment
        with self._log.open("a", encoding="utf-8") as log:
            self._process = subprocess.Popen(
                self._command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.PIPE, text=True,
                errors="replace", env=environment, start_new_session=True,
            )  # fmt: skip
        assert self._process.stderr is not None
        self._reader = threading.Thread(target=self._relay, args=(self._process.stderr,), name="relay", daemon=True)
        self._reader.start()

    def finish(self, timeout_seconds: float = 30.0) -> bool:
        """Waits until the process has done its work. Call it after the journal's `end` event has been written.

        Args:
            timeout_seconds: The longest wait; after it the process goes on alone.

        Returns:
            Whether it has done everything.
        """
        if self._process is None:
            return True
        try:
            code = self._process.wait(timeout_seconds)
        except subprocess.TimeoutExpired:
            _left_running.append(self._process)
            return False
        if self._reader is not None:
            self._reader.join(timeout=5)
        return code == 0

    def _relay(self, stream: IO[str]) -> None:
        with stream:
            for line in stream:
                self._say(line.rstrip("\n"))


def stand_aside() -> None:
    """In such a process: lets the training go first, and leaves signals to the trainer, which may still save."""
    with contextlib.suppress(OSError):
        os.nice(10)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the end of the trainer is ours
