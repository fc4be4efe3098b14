"""The progress bar stands below the log, and a log that goes to a file gets nothing of it."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest

TRAIN = (sys.executable, "-m", "framework.train", "+recipe=toy", "trainer.max_steps=60", "~callbacks.mlflow")
SAVES = "callbacks.async_checkpoint.every=10"
LINE = re.compile(r"\d\d:\d\d:\d\d (INFO|WARNING) ")


SAYS = """
import sys
from recipes.toy import Toy

class Says(Toy):
    def train_step(self, model, batch):
        print("said", file=sys.stderr)
        return super().train_step(model, batch)
"""


def on_terminal(folder: Path, *words: str, stderr: Path | None = None) -> str:
    """What a terminal gets of a run whose stdout, and stderr unless it is a file, are that terminal."""
    main, side = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "120"}
    file = None if stderr is None else stderr.open("wb")
    process = subprocess.Popen(
        [*TRAIN, *words], cwd=folder, env=environment, stdin=subprocess.DEVNULL, stdout=side, stderr=file or side
    )
    os.close(side)
    if file is not None:
        file.close()
    pieces = []
    while True:
        try:
            piece = os.read(main, 65536)
        except OSError:  # the last one that held the terminal is gone
            break
        if not piece:
            break
        pieces.append(piece)
    os.close(main)
    assert process.wait(60) == 0
    return b"".join(pieces).decode()


def seen(text: str) -> list[str]:
    """The lines as they stand on the terminal: what was erased is gone."""
    lines = (re.split(r"\x1b\[2K", line)[-1] for line in text.replace("\r", "").split("\n"))
    return [re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", line) for line in lines]


@pytest.mark.cold
def test_lines_of_the_log_never_land_in_the_bar(tmp_path: Path) -> None:
    text = on_terminal(tmp_path, SAVES)
    saves = [line for line in seen(text) if ": saved," in line]
    assert "━" in text and saves
    assert all(LINE.match(line) for line in saves), saves


@pytest.mark.cold
def test_a_log_that_goes_to_a_file_is_not_drawn_on_the_terminal(tmp_path: Path) -> None:
    (tmp_path / "says.py").write_text(SAYS)
    log = tmp_path / "log.txt"
    text = on_terminal(tmp_path, SAVES, "recipe._target_=says.Says", stderr=log)
    assert "━" in text and ": saved," not in text and "said" not in text
    assert ": saved," in log.read_text() and log.read_text().count("said") == 60 and "━" not in log.read_text()
