"""Processes and jobs that share one cache: nothing is fetched twice, nothing in use goes, nobody waits for ever."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from pathlib import Path

import pytest
from cache_support import ALL, another, assert_counted, counted, ended, fork, keep, make_idle, read

from framework.data.cache import LocalCache, housekeeping, usage
from framework.data.cache.locks import exclusive
from framework.data.cache.survey import survey

FILES, SIZE = 40, 2000


@pytest.fixture
def cache(tmp_path: Path) -> LocalCache:
    return LocalCache(tmp_path / "cache", **ALL)


def fetch_all(cache: LocalCache, seed: int, volume: int) -> None:
    """What a worker does: all files, in an order of its own; each read of the volume is noted."""
    space = cache.open("d1")
    keys = [f"{number % 3}/{number}" for number in range(FILES)]
    for key in random.Random(seed).sample(keys, FILES):
        if read(space, key, SIZE):
            continue
        with space.lock(key):
            if not read(space, key, SIZE):
                os.write(volume, f"{key}\n".encode())
                time.sleep(0.002)
                assert keep(space, key, SIZE)
    space.close()


def test_four_processes_on_a_cold_cache_fetch_each_file_once(cache: LocalCache, tmp_path: Path) -> None:
    volume = os.open(tmp_path / "fetched", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    start, release = os.pipe()

    def work(seed: int) -> None:
        os.close(release)
        os.read(start, 1)  # all at once
        threads = [threading.Thread(target=fetch_all, args=(cache, 10 * seed + number, volume)) for number in (1, 2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    pids = [fork(lambda seed=seed: work(seed)) for seed in range(4)]
    os.close(release)
    assert [ended(pid) for pid in pids] == [0] * 4
    fetched = (tmp_path / "fetched").read_text().split()
    assert len(fetched) == len(set(fetched)) == FILES
    assert counted(cache) == FILES * SIZE
    assert_counted(cache)


def test_whoever_dies_while_it_fetches_lets_the_next_one_fetch(cache: LocalCache) -> None:
    space = cache.open("d1")

    def hold() -> object:
        lock = space.lock("a")
        assert lock.__enter__()
        return lock

    with another(hold) as pid:
        with space.lock("a", timeout_seconds=0.05) as is_locked:
            assert not is_locked  # one that is stopped does not keep others from it
        with space.lock("b", timeout_seconds=0.05) as is_locked:
            assert is_locked
        os.kill(pid, signal.SIGKILL)
        with space.lock("a") as is_locked:
            assert is_locked


def test_a_process_that_is_stopped_while_it_counts_stops_nobody(
    cache: LocalCache, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(usage, "LOCK_SECONDS", 0.05)
    space = cache.open("d1")
    assert keep(space, "a", 10)

    def hold() -> object:
        lock = exclusive(cache.layout.usage)
        lock.__enter__()
        return lock

    with another(hold):
        assert keep(space, "b", 10) is None and read(space, "a", 10)
    assert not caplog.records  # its disk is well
    assert keep(LocalCache(cache.root, **ALL).open("d1"), "b", 10)


def test_what_a_live_process_uses_is_not_deleted_for_another_dataset(
    cache: LocalCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(housekeeping, "IDLE_SECONDS", 0.0)
    first = cache.open("d1")
    small = LocalCache(cache.root, limit=1500, min_free=0)

    def use() -> object:
        assert keep(first, "a", 1000)
        return first

    with another(use):
        make_idle(first, 1000)
        assert keep(small.open("d2"), "b", 1000) is None
        assert read(first, "a", 1000)
        first.close()
    again = LocalCache(cache.root, limit=1500, min_free=0).open("d2")
    assert keep(again, "b", 1000) and not read(first, "a", 1000)
    assert_counted(cache)


def test_two_jobs_with_different_datasets_share_the_limit(cache: LocalCache) -> None:
    def job(name: str) -> None:
        space = LocalCache(cache.root, limit=10_000, min_free=0).open(name)
        for number in range(20):
            keep(space, str(number), 900)
        assert all(read(space, str(number), 900) or not space.path(str(number), 900) for number in range(20))

    pids = [fork(lambda name=name: job(name)) for name in ("d1", "d2")]
    assert [ended(pid) for pid in pids] == [0, 0]
    assert counted(cache) == 11 * 900
    assert_counted(cache)


def test_a_dataset_of_a_job_that_was_killed_waits_for_its_return(cache: LocalCache) -> None:
    with another(lambda: keep(cache.open("d1"), "a", 1000)):
        pass
    small = LocalCache(cache.root, limit=1500, min_free=0)
    assert keep(small.open("d2"), "b", 1000) is None
    assert read(cache.open("d1"), "a", 1000)


def test_a_child_that_does_not_use_the_cache_keeps_nothing_in_use(cache: LocalCache) -> None:
    space = cache.open("d1")
    assert keep(space, "a", 10)
    with space.lock("a"), another(lambda: None):
        assert [one.pids for one in survey(cache.layout)] == [(os.getpid(),)]
        space.close()
        assert [(one.pids, one.is_in_use) for one in survey(cache.layout)] == [((), False)]


def test_a_child_that_uses_the_cache_keeps_it_in_use(cache: LocalCache) -> None:
    space = cache.open("d1")
    assert keep(space, "a", 10)
    with another(lambda: read(space, "a", 10)) as pid:
        space.close()
        assert [(one.pids, one.is_in_use) for one in survey(cache.layout)] == [((pid,), True)]
    assert [(one.pids, one.is_in_use) for one in survey(cache.layout)] == [((), False)]


def test_processes_forked_in_the_middle_of_everything_go_on(cache: LocalCache) -> None:
    """Threads of the parent hold locks at the moment of the fork; neither child nor parent may wait for those."""
    space = cache.open("d1")
    stop = threading.Event()

    def work(name: int) -> None:
        number = 0
        while not stop.is_set():
            with space.lock(str(name)):
                admission = space.admit(f"{name}/{number % 50}", 100)
                if admission is not None:
                    admission.cancel()
            number += 1

    threads = [threading.Thread(target=work, args=(name,)) for name in range(3)]
    for thread in threads:
        thread.start()
    try:
        codes = [ended(fork(lambda number=number: keep(space, f"c/{number}", 100))) for number in range(8)]
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert codes == [0] * 8 and all(read(space, f"c/{number}", 100) for number in range(8))
    assert_counted(cache)


def test_deleting_a_dataset_by_force_makes_its_users_fetch_anew(cache: LocalCache) -> None:
    space = cache.open("d1")
    assert keep(space, "a", 10)
    assert cache.housekeeping.clear(space.folder) is None
    assert cache.housekeeping.clear(space.folder, force=True) == 10
    assert not read(space, "a", 10)
    assert keep(space, "a", 10) is None and keep(space, "a", 10)
    assert read(space, "a", 10) and cache.housekeeping.clear(space.folder) is None
    assert_counted(cache)


def test_a_dataset_that_is_deleted_while_a_job_begins_is_made_anew(cache: LocalCache) -> None:
    """The lease is waited for, and then belongs to a folder that is gone."""
    space = cache.open("d1")
    assert keep(space, "a", 10)
    space.close()
    with exclusive(space.folder / "lease"):
        found: list[bool] = []
        thread = threading.Thread(target=lambda: found.append(cache.open("d1").lease()))
        thread.start()
        time.sleep(0.05)
        os.rename(space.folder, cache.root / "gone")
    thread.join(60)
    assert found == [True] and (space.folder / "lease").exists() and not read(space, "a", 10)
