"""At most one live process owns a run directory."""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
import signal
import socket
import threading
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from framework import rundir
from framework.errors import RunOwnedError
from framework.rundir import MISSES, RENEW_SECONDS, Lease, Owner, RunDirectory


def own_until_killed(path: Path, ready: Any) -> None:
    lease = RunDirectory(path).acquire()
    ready.send(lease.attempt)
    time.sleep(60)


def start_owner(path: Path) -> tuple[Any, int]:
    """Another live process that owns the directory, and its attempt."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=own_until_killed, args=(path, theirs))
    process.start()
    theirs.close()
    assert ours.poll(30)
    return process, ours.recv()


def kill(process: Any) -> None:
    process.kill()
    process.join(10)


def write_owner(run: RunDirectory, **changes: Any) -> Owner:
    """An owner.json as a live owner on this very process would have written it, with changes."""
    me = psutil.Process()
    owner = replace(Owner(socket.gethostname(), me.pid, me.create_time(), 4, "theirs", time.time()), **changes)
    run.path.mkdir(parents=True, exist_ok=True)
    run.owner_file.write_text(json.dumps(asdict(owner)))
    return owner


def test_a_second_live_run_is_refused_with_the_owner_named(tmp_path: Path) -> None:
    process, attempt = start_owner(tmp_path / "run")
    try:
        with pytest.raises(RunOwnedError) as caught:
            RunDirectory(tmp_path / "run").acquire()
    finally:
        kill(process)
    for part in (str(tmp_path / "run"), f"pid {process.pid}", socket.gethostname(), f"attempt {attempt}", "run.name"):
        assert part in str(caught.value)


def test_a_dead_owner_is_replaced_at_once_by_the_next_attempt(tmp_path: Path) -> None:
    process, attempt = start_owner(tmp_path / "run")
    kill(process)
    assert process.exitcode == -signal.SIGKILL
    lease = RunDirectory(tmp_path / "run").acquire()
    assert (attempt, lease.attempt) == (1, 2)
    lease.release()


def test_a_killed_owner_that_nobody_has_collected_is_dead(tmp_path: Path) -> None:
    process, _ = start_owner(tmp_path / "run")
    os.kill(process.pid, signal.SIGKILL)
    deadline = time.monotonic() + 20
    while psutil.Process(process.pid).status() != psutil.STATUS_ZOMBIE and time.monotonic() < deadline:
        time.sleep(0.01)
    RunDirectory(tmp_path / "run").acquire().release()
    kill(process)


def test_a_process_that_got_the_pid_of_a_dead_owner_is_not_taken_for_it(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    live = write_owner(run)
    assert live.is_live
    with pytest.raises(RunOwnedError):
        run.acquire()
    write_owner(run, started=live.started - 3600)
    lease = run.acquire()
    assert lease.attempt == 5
    lease.release()


def test_a_lost_host_keeps_the_directory_for_three_misses_and_no_longer(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    limit = MISSES * RENEW_SECONDS
    write_owner(run, host="another-host", pid=1, renewed=time.time() - limit + 15)
    with pytest.raises(RunOwnedError, match="another-host"):
        run.acquire()
    write_owner(run, host="another-host", pid=1, renewed=time.time() - limit - 1)
    run.acquire().release()


def test_the_old_owner_sees_that_it_lost_the_lease_and_does_not_take_it_back(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    old = run.acquire()
    assert old.is_held()
    newer = write_owner(run, attempt=old.attempt + 1)
    assert not old.is_held()
    old.release()
    assert run.owner() == newer


def test_each_ownership_has_a_token_and_an_attempt_of_its_own(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    seen = set()
    for attempt in (1, 2, 3):
        lease = run.acquire()
        seen.add(lease.token)
        assert lease.attempt == attempt
        lease.release()
    assert len(seen) == 3


def test_release_gives_the_directory_back_and_can_be_called_twice(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    lease = run.acquire()
    lease.release()
    lease.release()
    owner = run.owner()
    assert owner is not None and not owner.is_live and owner.pid == os.getpid()


def test_a_forked_child_cannot_release_its_parents_lease(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    lease = run.acquire()
    process = multiprocessing.get_context("fork").Process(target=lease.release)
    process.start()
    process.join(30)
    assert process.exitcode == 0 and lease.is_held()
    owner = run.owner()
    assert owner is not None and owner.is_live
    lease.release()


def test_the_lease_is_renewed_while_it_is_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rundir, "RENEW_SECONDS", 0.01)
    run = RunDirectory(tmp_path)
    lease = run.acquire()
    first = run.owner()
    assert first is not None
    deadline = time.monotonic() + 20
    while (now := run.owner()) is not None and now.renewed <= first.renewed and time.monotonic() < deadline:
        time.sleep(0.01)
    assert now is not None and now.renewed > first.renewed and now.token == first.token
    lease.release()
    after = run.owner()
    assert after is not None and after.renewed == 0


def test_a_mount_that_is_away_for_a_while_does_not_end_the_renewals(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rundir, "RENEW_SECONDS", 0.01)
    run = RunDirectory(tmp_path)
    real, away, tried = RunDirectory.owner, threading.Event(), threading.Event()

    def owner(self: RunDirectory) -> Owner | None:
        if threading.current_thread().name == "lease" and away.is_set():
            tried.set()
            raise OSError(errno.ESTALE, "Stale file handle")
        return real(self)

    monkeypatch.setattr(RunDirectory, "owner", owner)
    away.set()
    lease = run.acquire()
    assert tried.wait(20)
    away.clear()
    before = run.owner()
    deadline = time.monotonic() + 20
    while (now := run.owner()) is not None and now == before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert now is not None and before is not None and now.renewed > before.renewed
    lease.release()


def test_attempts_count_on_from_whatever_left_a_trace(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    run.events_file(7, 0).parent.mkdir(parents=True)
    lease = run.acquire()
    assert lease.attempt == 8
    lease.release()


@pytest.mark.parametrize("content", ["", "{", "[]", '{"pid": 1}'])
def test_a_damaged_owner_file_does_not_block_the_run(tmp_path: Path, content: str) -> None:
    run = RunDirectory(tmp_path)
    run.owner_file.write_text(content)
    run.acquire().release()


def test_making_the_object_touches_nothing(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "a" / "run")
    run.refuse_live_owner()
    assert run.owner() is None and list(tmp_path.iterdir()) == []


def test_of_two_that_start_together_one_owns(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    gate, answers = context.Event(), context.Queue()
    racers = [context.Process(target=race, args=(tmp_path, gate, answers)) for _ in range(4)]
    for racer in racers:
        racer.start()
    gate.set()
    outcomes = sorted(answers.get(timeout=30) for _ in racers)
    for racer in racers:
        kill(racer)
    assert outcomes == ["owned", "refused", "refused", "refused"]


def race(path: Path, gate: Any, answers: Any) -> None:
    gate.wait(30)
    try:
        lease: Lease | None = RunDirectory(path).acquire()
    except RunOwnedError:
        lease = None
    answers.put("owned" if lease is not None else "refused")
    time.sleep(60)  # the owner lives until the test has seen all answers
