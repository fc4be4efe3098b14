"""One S3-compatible server for all tests of a session, over real HTTP.

Guarantee: it is started when first needed, listens on a free port of this machine alone, and is dead after `stop`, or
when this process is.
"""

from __future__ import annotations

import contextlib
import http.client
import os
from pathlib import Path

from support.piped import Piped

PROGRAM = Path(__file__).resolve().parent / "s3process.py"
START_SECONDS = 120.0  # it takes one second; the machine may be busy


class S3Server:
    """A running server (moto); objects live in its memory."""

    def __init__(self) -> None:
        environment = {name: value for name, value in os.environ.items() if not name.startswith("AWS_")}
        self._process = Piped(PROGRAM, environment | {"PYTHONWARNINGS": "ignore"}, "the S3 server")
        try:
            self.port = int(self._process.answer(START_SECONDS))
        except BaseException:
            self.stop()
            raise

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
        self._process.stop()


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
