"""What a terminal, a file or a pipe gets of a program."""

from __future__ import annotations

import os
import pty
import re
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def on_terminal(command: Sequence[str], folder: Path, environment: Mapping[str, str], timeout: float = 120.0) -> str:
    """Runs a program whose streams are a terminal; everything that this got."""
    main, side = pty.openpty()
    settings = {**environment, "TERM": "xterm", "COLUMNS": "140", "LINES": "40"}
    process = subprocess.Popen(
        command, cwd=folder, env=settings, stdin=subprocess.DEVNULL, stdout=side, stderr=side, start_new_session=True
    )
    os.close(side)
    deadline, pieces = time.monotonic() + timeout, []
    try:
        while time.monotonic() < deadline:
            try:
                piece = os.read(main, 65536)
            except OSError:  # the last one that held the terminal is gone
                break
            if not piece:
                break
            pieces.append(piece)
        assert process.wait(30) == 0, b"".join(pieces).decode(errors="replace")
    finally:
        os.close(main)
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(10)
    return b"".join(pieces).decode()


def frames(text: str) -> list[str]:
    """All that was drawn, piece by piece, without control codes."""
    return [line for piece in re.split(r"[\r\n]|\x1b\[2K", text) if (line := CONTROL.sub("", piece).strip())]


def standing(text: str) -> list[str]:
    """The lines as they stand at the end: what was erased is gone."""
    lines = (re.split(r"\x1b\[2K", line)[-1] for line in text.replace("\r", "").split("\n"))
    return [stripped for line in lines if (stripped := CONTROL.sub("", line).rstrip())]
