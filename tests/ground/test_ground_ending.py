"""How a process ends while a thread of it is in a call of C++: with its exit code, and never with an abort."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
# whose threads run nothing but Python and its files, or are not the trainer's
PLAIN = {
    "callbacks/async_checkpoint.py", "checkpoint/marks.py", "data/serving.py", "ending.py",
    "goodput/tracking/side_process.py", "goodput/tracking/system_metrics.py", "goodput/tracking/watch.py", "rundir.py",
}  # fmt: skip

# The thread asks the store of the ranks again and again, so it is in there, or about to come back, at any time. What is
# deleted last sleeps while the interpreter is taken apart: that long it can come back.
PROGRAM = """
import atexit, multiprocessing.util, sys, threading, time
from framework import ending
import torch.distributed as dist

class Slow:
    def __del__(self, sleep=time.sleep):
        sleep(0.5)

def ask():
    while True:
        store.check(["nothing"])

store = dist.TCPStore("127.0.0.1", 0, is_master=True)
sys.slow = Slow()
ending.Background(ask, "asks").start()
atexit.register(print, "every exit handler ran", end="")
multiprocessing.util.Finalize(None, print, ["; processes were ended"], {"end": ""}, exitpriority=1)
time.sleep(0.05)
"""


def ends(last_line: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", PROGRAM + last_line]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.parametrize(
    ("last_line", "code"), [("sys.exit(ending.exits_with(75))", 75), ("raise ValueError('as it should')", 1)]
)
def test_a_process_whose_thread_hangs_in_a_call_keeps_its_exit_code_and_its_output(last_line: str, code: int) -> None:
    result = ends(last_line)
    assert result.returncode == code, result.stderr
    assert result.stdout == "every exit handler ran; processes were ended"


def test_threads_that_may_hang_in_a_call_are_of_the_kind_that_a_process_can_end_without() -> None:
    found = set()
    for path in sorted((ROOT / "framework").rglob("*.py")):
        names = {ast.unparse(node.func) for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)}
        if names & {"threading.Thread", "Thread"}:
            found.add(str(path.relative_to(ROOT / "framework")))
    assert found <= PLAIN, f"use framework.ending.Background: {found - PLAIN}"
