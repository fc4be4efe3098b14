"""A start under a launcher: bounded, whatever a call of torch waits for, and given up by ranks that lost the launcher."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from datetime import timedelta
from pathlib import Path

import psutil
import pytest
import torch.distributed as dist

from framework import distributed, launcher
from framework.distributed import Group, World
from framework.errors import DistributedError
from tests.loop.ranks import in_ranks

ROOT = Path(__file__).parent.parent.parent

# stands for torchrun, whose start takes seconds: a parent, and these variables
LAUNCHER = "import subprocess, sys; subprocess.run([sys.executable, '-c', sys.argv[1]])"
RANK = """
import sys
from framework import distributed, ending
from framework.errors import DistributedError
print("joins", flush=True)
try:
    distributed.join("cpu", timeout_seconds=1000)
except DistributedError as error:
    print(error, flush=True)
    sys.exit(ending.exits_with(1))
"""


def test_a_rank_whose_launcher_is_killed_while_it_waits_for_another_ends_by_itself() -> None:
    variables = {
        "TORCHELASTIC_RUN_ID": "x", "RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0",
    }  # fmt: skip
    command = [sys.executable, "-c", LAUNCHER, RANK]
    process = subprocess.Popen(command, cwd=ROOT, env=os.environ | variables, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "joins\n"
    (rank,) = psutil.Process(process.pid).children()
    process.send_signal(signal.SIGKILL)
    process.wait(30)
    try:
        rank.wait(60)
        said = process.stdout.read()
    finally:
        if rank.is_running():
            rank.kill()
        process.stdout.close()
    assert said.startswith(f"Rank 0: the launcher (torchrun, process {process.pid}) ended while this rank was joining")


def test_a_call_that_waits_longer_than_it_says_is_left_behind() -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True)
    other = store.clone()
    has_ended = threading.Event()

    def wait() -> None:
        try:
            store.wait(["never"], timedelta(seconds=20))
        finally:
            has_ended.set()

    with pytest.raises(DistributedError, match=r"Rank 0 of 1 failed at testing within 0.1 s\. Some rank did not come"):
        launcher.within(wait, 0.1, "testing")
    assert not has_ended.is_set()
    other.set("never", "")
    assert has_ended.wait(30)


def make_group_alone(world: World, folder: Path) -> str:
    distributed.STORE_SECONDS = 0.5
    if world.rank == 1:
        while not (folder / "told").exists():
            threading.Event().wait(0.01)
        return ""
    try:
        Group(world, timeout_seconds=0.5, name="saving")
    except DistributedError as error:
        return str(error)
    finally:
        (folder / "told").touch()
    return "nobody was missed"


def test_a_group_for_which_a_rank_does_not_come_is_named(tmp_path: Path) -> None:
    message, _ = in_ranks(2, make_group_alone, tmp_path)
    assert message.startswith("Rank 0 of 2 failed at agreeing on the group 'saving' within ")


def test_only_what_torchrun_started_can_lose_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher._Parent, "pid", os.getppid() + 1)
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    assert not launcher.has_died()
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    assert launcher.has_died()
