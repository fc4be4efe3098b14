"""A helper process that is spoken to over its pipes.

Guarantee: every wait is bounded. The process is in a session of its own, so that a Ctrl-C leaves it alone, and ends when
its stdin does: after `stop`, or when this process is gone.
"""

from __future__ import annotations

import select
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

STOP_SECONDS = 10.0


class Piped:
    """A Python program that reads lines from stdin and answers on stdout; its stderr is this process's.

    Args:
        program: Its file.
        environment: Its variables.
        what: How errors call it.
    """

    def __init__(self, program: Path, environment: Mapping[str, str], what: str) -> None:
        self._what = what
        self._process = subprocess.Popen(
            [sys.executable, str(program)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=dict(environment),
            cwd="/",
            text=True,
            start_new_session=True,
        )
        self.pid = self._process.pid

    def tell(self, line: str) -> None:
        """Sends one line."""
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()

    def answer(self, timeout: float) -> str:
        """Its next line.

        Raises:
            RuntimeError: It gave none within the timeout, in seconds, or has ended.
        """
        assert self._process.stdout is not None
        if not select.select([self._process.stdout], [], [], timeout)[0]:
            raise RuntimeError(f"{self._what} did not answer within {timeout:g} s")
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self._what} has ended; see its stderr above")
        return line

    def stop(self) -> None:
        """Closes its stdin and waits for its end; kills it if that takes too long."""
        with self._process:  # leaving it closes the pipes
            assert self._process.stdin is not None
            self._process.stdin.close()
            try:
                self._process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                self._process.kill()
