"""A writer that was left for dead and goes on cannot publish, wherever in its save it was stopped."""

from __future__ import annotations

import ctypes
import functools
import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from checkpoint_support import SOLO, make_writer, save, small_state, solo_group
from fault_support import assert_all_whole, assert_restores, ended, fork

from framework import rundir
from framework.checkpoint import CheckpointStore, SaveHeader
from framework.errors import RunOwnedError
from framework.rundir import RunDirectory

NEW_HOST_NAME = 0x04000000  # CLONE_NEWUTS
REFUSED = 7


def move_to_another_host() -> None:
    """A host name of its own: for leases this process is on another host from then on."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(NEW_HOST_NAME) != 0 or libc.sethostname(b"elsewhere", 9) != 0:
        os._exit(REFUSED)
    assert socket.gethostname() == "elsewhere"


def first_attempt(path: Path, place: str, step: int, report: int) -> None:
    """Saves a step as the owner of the run; stops itself at that place of the save, once."""
    run = RunDirectory(path)
    lease = run.acquire()
    store = CheckpointStore(run.checkpoints)
    stopped = []

    def stopping(real: Callable[..., Any], *arguments: Any) -> Any:
        if not stopped and threading.current_thread().name != "lease":
            stopped.append(True)
            signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)  # this thread stops at once
        return real(*arguments)

    def is_owner() -> bool:
        return bool(stopping(lease.is_held)) if place == "asking" else lease.is_held()

    writer = make_writer(store, attempt=lease.attempt, is_owner=is_owner)
    writer.prepare(small_state(step))
    if place != "asking":
        name = {"writing": "fsync", "publishing": "replace"}[place]
        setattr(os, name, functools.partial(stopping, getattr(os, name)))
    writer.start(small_state(step), SaveHeader(step))
    (result,) = writer.wait(60)
    os.write(report, f"{result.committed} {result.error}".encode())
    assert stopped
    lease.release()


def second_attempt(path: Path, step: int) -> None:
    move_to_another_host()
    run = RunDirectory(path)
    deadline = time.monotonic() + 60
    while (owner := run.owner()) is not None and owner.is_live and time.monotonic() < deadline:
        time.sleep(0.02)
    lease = run.acquire()
    assert lease.attempt == 2
    store = CheckpointStore(run.checkpoints)
    store.sweep(lease.attempt)
    writer = make_writer(store, attempt=lease.attempt, is_owner=lease.is_held)
    writer.start(small_state(step), SaveHeader(step))
    assert writer.wait(60)[0].committed
    os._exit(0)  # without giving the run back


@pytest.mark.parametrize("place", ["writing", "asking", "publishing"])
@pytest.mark.parametrize("step", [2, 3], ids=["same_step", "later_step"])
def test_a_stopped_writer_that_goes_on_after_another_attempt_took_over_publishes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str, step: int
) -> None:
    monkeypatch.setattr(rundir, "RENEW_SECONDS", 0.1)  # three missed renewals are 0.3 s
    run = tmp_path / "run"
    store = CheckpointStore(run / "checkpoints")
    save(store, 1)
    told, report = os.pipe()
    old = fork(lambda: first_attempt(run, place, step, report))
    os.close(report)
    _, status = os.waitpid(old, os.WUNTRACED)
    assert os.WIFSTOPPED(status)
    assert [found.step for found in store.list()] == [1]
    with pytest.raises(RunOwnedError):  # it is alive: here nobody takes its place, and elsewhere it is given up
        RunDirectory(run).acquire()
    code = ended(fork(lambda: second_attempt(run, 2)), 120)
    if code == REFUSED:
        os.kill(old, signal.SIGKILL)
        ended(old, 60)
        pytest.skip("no right to a host name of its own")
    assert code == 0
    before = {path: path.stat().st_mtime_ns for path in store.folder(2).iterdir()}
    os.kill(old, signal.SIGCONT)
    assert ended(old, 60) == 0
    said = os.read(told, 10_000).decode()
    os.close(told)
    assert said.startswith("False "), said
    assert str(store.folder(step)) in said
    if place == "asking":
        assert "superseded" in said or "No such file" in said
    assert [found.step for found in store.list()] == [2, 1]
    assert store.list()[0].manifest.attempt == 2
    assert {path: path.stat().st_mtime_ns for path in store.folder(2).iterdir()} == before
    assert assert_all_whole(store) == 2 == assert_restores(store.path, SOLO, solo_group(), small_state)
    owner = RunDirectory(run).owner()
    assert owner is not None and owner.attempt == 2
