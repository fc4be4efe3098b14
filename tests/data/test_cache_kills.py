"""Killed at any moment, a process leaves no file that is read short, and nothing that is never found again.

A sample of the calls runs always, all of them and random kills of many processes under `make soak`.
"""

from __future__ import annotations

import contextlib
import errno
import os
import random
import shutil
import signal
import time
from pathlib import Path

import pytest
from cache_support import ALL, assert_counted, counted, ended, fork, keep, kept_bytes, read
from syscalls import supervise
from syscalls import supervised as supervised

from framework.data.cache import LocalCache, housekeeping
from framework.errors import ConfigError

MOST = 1000  # calls; more would be a fault of the test
FILES = (("a/one", 3000, 1), ("a/two", 5000, 1), ("a/one", 4000, 2), ("a", 100, 1))


@pytest.fixture
def quick(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def job(root: Path) -> None:
    """Makes a cache, keeps files, replaces one, has one in transit, deletes another dataset."""
    cache = LocalCache(root, **ALL)
    other = cache.open("old")
    keep(other, "x", 700)
    other.close()
    space = cache.open("d1")
    for key, size, stamp in FILES:
        keep(space, key, size, stamp)
    transit = space.transit()
    transit.write("t/one", 3, [b"123"])
    transit.close()
    with contextlib.suppress(OSError):  # of the call that fails
        cache.housekeeping.clear(other.folder)
    space.close()


def assert_sound(root: Path) -> None:
    """All that is found is right; a new process finds the counter right, or puts it right, and can go on."""
    cache = LocalCache(root, **ALL)
    space = cache.open("d1")
    for key, size, stamp in FILES:
        read(space, key, size, stamp)
    assert counted(cache) >= kept_bytes(cache)
    assert not list((space.folder / "parts").iterdir())
    transit = space.transit()
    transit.write("t/one", 3, [b"123"])
    assert len(list(transit.folder.iterdir())) == 1
    transit.close()
    cache.housekeeping.make_room(lambda: False, 60.0)
    assert not cache.layout.trash.exists() or not list(cache.layout.trash.iterdir())
    cache.usage.recount(lambda: housekeeping.held(cache.layout))
    for key, size, stamp in FILES:
        assert keep(space, key, size, stamp) and read(space, key, size, stamp)
    assert_counted(cache)
    space.close()


def killed(root: Path, first: int, every: int) -> list[str]:
    for number in range(first, MOST, every):
        shutil.rmtree(root, ignore_errors=True)
        outcome = supervise(lambda: job(root), root, stop_at=number)
        assert outcome.code in (0, -signal.SIGKILL), f"call {number}, {outcome.calls[-1]}"
        if (root / "cache.json").exists():
            assert_sound(root)
        else:
            job(root)
        if outcome.code == 0:
            return [name for name, _ in outcome.calls]
    raise AssertionError("it never ended")


def failing(root: Path, first: int, every: int) -> None:
    """Whatever call fails, the job goes on, or says at its start that there can be no cache."""

    def body() -> None:
        try:
            job(root)
        except ConfigError:
            os._exit(7)

    for number in range(first, MOST, every):
        shutil.rmtree(root, ignore_errors=True)
        error = (errno.ENOSPC, errno.EIO, errno.EDQUOT, errno.EROFS)[number // every % 4]
        outcome = supervise(body, root, stop_at=number, error=error)
        where = f"call {number}, {outcome.calls[number - 1 : number]}"
        assert outcome.code in (0, 7), where
        if len(outcome.calls) < number:
            return
        if outcome.code == 0:
            assert_sound(root)
        else:
            assert not (root / "data").exists(), where
    raise AssertionError("it never ended")


@pytest.mark.usefixtures("supervised")
def test_killed_at_a_call_it_leaves_a_sound_cache(quick: Path) -> None:
    names = killed(quick, first=2, every=5)
    assert len(names) > 60 and {"open", "write", "rename", "unlink", "mkdir", "pwrite64", "rmdir"} <= set(names), names


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.usefixtures("supervised")
def test_killed_at_every_call_it_leaves_a_sound_cache(quick: Path) -> None:
    killed(quick, first=1, every=1)


@pytest.mark.usefixtures("supervised")
def test_a_call_that_fails_stops_nothing(quick: Path) -> None:
    failing(quick, first=1, every=5)


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.usefixtures("supervised")
def test_no_call_that_fails_stops_anything(quick: Path) -> None:
    for shift in range(4):
        failing(quick, first=1 + shift, every=1)


def roam(root: Path, seed: int) -> None:
    """A job that keeps, reads, gives up, deletes and leaves at random, until it is killed."""
    housekeeping.IDLE_SECONDS = 0.0
    chance = random.Random(seed)
    cache = LocalCache(root, limit=200_000, min_free=0)
    space = cache.open(f"d{seed % 3}")
    while True:
        key, size, stamp = str(chance.randrange(60)), chance.choice((0, 1000, 20_000)), chance.randrange(2)
        match chance.randrange(12):
            case 0:
                space.close()
                space = cache.open(f"d{chance.randrange(3)}")
            case 1:
                admission = space.admit(key, size, stamp)
                if admission is not None:
                    admission.cancel()
            case 2:
                cache.housekeeping.make_room(lambda: False, 0.001)
            case _:
                with space.lock(key, timeout_seconds=0.1):
                    if not read(space, key, size, stamp):
                        keep(space, key, size, stamp)


def roaming(root: Path, processes: int, kills: int) -> None:
    chance = random.Random(7)
    pids = [fork(lambda seed=seed: roam(root, seed)) for seed in range(processes)]
    try:
        for number in range(processes, processes + kills):
            time.sleep(chance.random() * 0.02)
            victim = chance.randrange(processes)
            os.kill(pids[victim], signal.SIGKILL)
            assert ended(pids[victim]) == -signal.SIGKILL
            pids[victim] = fork(lambda seed=number: roam(root, seed))
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        codes = [ended(pid) for pid in pids]
    assert codes == [-signal.SIGKILL] * processes  # none had failed
    cache = LocalCache(root, limit=200_000, min_free=0)
    for name in ("d0", "d1", "d2"):
        space = cache.open(name)
        for number in range(60):
            for size in (0, 1000, 20_000):
                for stamp in range(2):
                    read(space, str(number), size, stamp)
        assert not list((space.folder / "parts").iterdir())
    assert kept_bytes(cache) <= 200_000 + 20_000 * processes
    assert counted(cache) >= kept_bytes(cache)


def test_random_kills_of_processes_that_share_a_cache(quick: Path) -> None:
    roaming(quick, processes=3, kills=12)


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_many_random_kills_of_processes_that_share_a_cache(quick: Path) -> None:
    roaming(quick, processes=4, kills=600)
