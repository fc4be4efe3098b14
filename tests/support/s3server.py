"""One S3-compatible server for all tests of a session, over real HTTP.

Guarantee: it is started when first needed, listens on a free port of this machine alone, and is dead after `stop`, or
when this process is.
"""

from __future__ import annotations

import contextlib
import http.client
import os
import select
import subprocess
import sys
from pathlib import Path

PROGRAM = Path(__file__).resolve().parent / "s3process.py"
START_SECONDS = 120.0  # it takes one second; the machine may be busy


class S3Server:
    """A running server (moto); objects live in its memory."""

    def __init__(self) -> None:
        environment = {name: value for name, value in os.environ.items() if not name.startswith("AWS_")}
        self._process = subprocess.Popen(
            [sys.executable, str(PROGRAM)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment | {"PYTHONWARNINGS": "ignore"},
            cwd="/",
            start_new_session=True,
        )
        assert self._process.stdout is not None
        ready = select.select([self._process.stdout], [], [], START_SECONDS)[0]
        line = self._process.stdout.readline() if ready else b""
        if not line:
            self.stop()
            raise RuntimeError(f"the S3 server did not start within {START_SECONDS:g} s; see its stderr above")
        self.port = int(line)

    def make_bucket(self, name: str) -> None:
        self.ask("PUT", f"/{name}")

    def forget(self) -> None:
        """Deletes everything in it."""
        self.ask("POST", "/moto-api/reset")

    def ask(self, method: str, path: str, body: bytes = b"") -> bytes:
        """The answer to one request, sent past all faults.

        Raises:
            RuntimeError: The answer was not a success.
        """
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)) as connection:
            connection.request(method, path, body=body, headers={"Content-Length": str(len(body))})
            answer = connection.getresponse()
            text = answer.read()
        if answer.status >= 300:
            raise RuntimeError(f"{method} {path}: {answer.status} {text.decode(errors='replace')[:300]}")
        return text

    def stop(self) -> None:
        with self._process:  # leaving it closes the pipes
            assert self._process.stdin is not None
            self._process.stdin.close()
            try:
                self._process.wait(10)
            except subprocess.TimeoutExpired:
                self._process.kill()


_server: S3Server | None = None


def server() -> S3Server:
    """The one of this session, started when first asked for."""
    global _server
    if _server is None:
        _server = S3Server()
    return _server


def stop() -> None:
    """Ends it, at the end of the session."""
    global _server
    if _server is not None:
        _server.stop()
        _server = None
