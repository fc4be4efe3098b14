"""`tail`: what a user sees of a run that goes on."""

from __future__ import annotations

import io
import os
import pty
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from goodput_runs import Run, clean_environment, finish, started

from framework.goodput.__main__ import main


def tail(run: Path, *options: str, **popen: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "framework.goodput", "tail", str(run), *options]
    streams: dict[str, object] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | popen
    return started(subprocess.Popen(command, text=True, env=clean_environment(), **streams))  # type: ignore[call-overload]


def line_with(words: str, process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    end = time.monotonic() + 60
    while time.monotonic() < end:
        line = process.stdout.readline()
        assert line, f"it ended before it said {words!r}"
        if words in line:
            return line
    raise AssertionError(f"it never said {words!r}")


def test_a_run_is_waited_for_and_followed_to_its_end_in_plain_lines(tmp_path: Path) -> None:
    process = tail(tmp_path / "toy")
    line_with("toy has not begun yet", process)
    run = Run(tmp_path)
    lease = run.directory.acquire()
    try:
        run.start(os.getpid())
        line_with("attempt 1 began on here, 2 ranks", process)
        run.steps(1, 40).commit(40)
        assert "0.25 s in the way of the steps, durable 1.5 s later" in line_with("step 40: saved", process)
        assert process.poll() is None
        run.end()
        code, out, err = finish(process)
    finally:
        lease.release()
    assert (code, err) == (0, "")
    assert "attempt 1 ended at step 40: finished" in out
    assert "step 40 of 40 · goodput" in out.splitlines()[-1]
    assert "\x1b" not in out


def test_a_killed_run_is_told_and_with_restarts_waited_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = Run(tmp_path)
    run.start(1).steps(1, 20).journal.close()
    assert main(["tail", str(run.path)]) == 0
    shown = capsys.readouterr().out
    assert shown.count("attempt 1 is gone, and left no word") == 1
    process = tail(run.path, "--restarts")
    line_with("attempt 1 is gone", process)
    run.start(1, step=10).steps(11, 40).end()
    code, out, _ = finish(process)
    assert code == 0
    assert "attempt 2 goes on from step 10" in out
    assert "10 done twice" in out.splitlines()[-1]


def test_ctrl_c_ends_it_without_a_traceback(tmp_path: Path) -> None:
    process = tail(tmp_path / "toy")
    line_with("waiting", process)
    process.send_signal(signal.SIGINT)
    assert finish(process) == (0, "", "")


def test_text_of_a_run_steers_no_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = Run(tmp_path).start(1, host="\x1b[2J[red]h[/red]")
    run.journal.event("failure", type="E", message="\x1b]0;owned\x07 [bold]", step=3)
    run.end("failed", 1)
    assert main(["tail", str(run.path)]) == 0
    shown = capsys.readouterr().out
    assert "\x1b" not in shown and "[red]h[/red]" in shown and "[bold]" in shown


def test_on_a_terminal_a_panel_has_the_figures(tmp_path: Path) -> None:
    run = Run(tmp_path).start(1).steps(1, 40).commit(40).end()
    leader, follower = pty.openpty()
    process = tail(run.path, stdout=follower, stderr=follower, stdin=follower)
    os.close(follower)
    shown = io.BytesIO()
    while select.select([leader], [], [], 60)[0]:
        try:
            data = os.read(leader, 65536)
        except OSError:  # the terminal is closed
            break
        shown.write(data)
    os.close(leader)
    assert process.wait(timeout=30) == 0
    text = shown.getvalue().decode()
    assert "step 40: saved" in text
    assert "attempt 1 · goodput" in text and "█" in text
