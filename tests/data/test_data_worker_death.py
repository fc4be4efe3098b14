"""A loader process that dies is replaced at the exact position, a bounded number of times."""

from __future__ import annotations

import itertools
import logging
import os
import re
import signal
import time
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import pytest
from augmented_sets import Augmented
from data_sets import Blobs, Mortal, Numbers, as_list
from test_data_loader import SAMPLES, fingerprints
from test_data_workers import is_running, pids, wait_until

from framework.data import DataLoader, EvalLoader
from framework.errors import DataError


def test_killed_workers_are_replaced_and_no_bit_changes(caplog: pytest.LogCaptureFixture) -> None:
    def load(workers: int, kills: dict[int, int]) -> list[list[tuple[int, str]]]:
        loader = DataLoader(Augmented(SAMPLES), 4, seed=4, endless=True, num_workers=workers)
        batches, taken = iter(loader), []
        for number in range(40):
            taken.append(fingerprints(next(batches)))
            if number in kills:
                os.kill(pids(loader)[kills[number]], signal.SIGKILL)
        assert loader.take_stats().worker_restarts == len(kills)
        loader.close()
        return taken

    with caplog.at_level(logging.WARNING):
        assert load(2, {2: 0, 11: 1, 12: 0}) == load(0, {})
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == 3
    for each, index in zip(told, [0, 0, 1] if "worker 0" in told[1] else [0, 1, 0], strict=True):
        pattern = (
            rf"rank 0 of 1: loader worker {index} of 2, pid \d+ was ended by signal SIGKILL wh.*\(. of 3 per epoch\)"
        )
        assert re.match(pattern, each)


def test_a_worker_is_replaced_in_the_way_that_is_right_by_then() -> None:
    """CUDA may have come into use since the first were forked."""
    loader = DataLoader(Numbers(40), 2, shuffle=False, num_workers=1)
    batches = iter(loader)
    taken = [next(batches).tolist()]
    pool = loader._pool
    assert pool is not None
    pool._choose_method = lambda: "forkserver"
    os.kill(pids(loader)[0], signal.SIGKILL)
    taken += [batch.tolist() for batch in batches]
    assert taken == [[n, n + 1] for n in range(0, 40, 2)]
    assert isinstance(pool._workers[0]._process, ForkServerProcess)
    loader.close()


def die(folder: Path, index: int, times: int) -> Path:
    """Has the sample end its worker so many times."""
    for number in range(times):
        (folder / f"{index}-{number}").touch()
    return folder


@pytest.mark.parametrize("how", ["kill", "exit"])
def test_a_batch_that_kills_its_worker_twice_still_comes(
    tmp_path: Path, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    loader = DataLoader(Mortal(40, die(tmp_path, 7, 2), how), 2, shuffle=False, num_workers=2)
    with caplog.at_level(logging.WARNING):
        assert [batch.tolist() for batch in loader] == [[n, n + 1] for n in range(0, 40, 2)]
    assert loader.take_stats().worker_restarts == 2
    assert all("while it had to load the samples [6, 7] (from position 6)" in each for each in caplog.messages)
    loader.close()


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("kill", r"rank 0 of 1: loader worker 1 of 2, pid \d+ was ended by signal SIGKILL .*samples \[6, 7\].*memory"),
        ("exit", r"loader worker 1 of 2, pid \d+ ended by itself with exit code 7 .*samples \[6, 7\]"),
    ],
    ids=["kill", "exit"],
)
def test_a_batch_that_kills_three_workers_is_named_and_the_loader_can_go_on(
    tmp_path: Path, how: str, message: str
) -> None:
    loader = DataLoader(Mortal(40, die(tmp_path, 7, 3), how), 2, shuffle=False, num_workers=2, worker_restarts=9)
    batches = iter(loader)
    first = pids(loader)
    with pytest.raises(DataError, match=message) as info:
        list(batches)
    assert "It is worker 3 in a row to die over them" in str(info.value)
    assert not any(is_running(pid) for pid in first)
    with pytest.raises(RuntimeError, match="iteration ended"):
        next(batches)
    loader.seek(10)
    assert [batch.tolist() for batch in loader][:2] == [[10, 11], [12, 13]]
    loader.close()


@pytest.mark.parametrize("restarts", [0, 2])
def test_only_so_many_workers_are_replaced_per_epoch(tmp_path: Path, restarts: int) -> None:
    deaths = [3, 9, 15][: restarts + 1]
    for index in deaths:
        die(tmp_path, index, 1)
    loader = DataLoader(Mortal(20, tmp_path), 1, shuffle=False, num_workers=2, worker_restarts=restarts)
    with pytest.raises(DataError, match=rf"samples \[{deaths[-1]}\].*worker_restarts={restarts} per epoch are used up"):
        list(loader)
    for index in deaths[:restarts]:
        die(tmp_path, index, 1)
    if restarts:  # the next epoch has a number of its own
        assert [batch.item() for batch in loader] == list(range(20))
    loader.close()


def test_an_endless_loader_counts_its_restarts_by_epoch(tmp_path: Path) -> None:
    die(tmp_path, 3, 1)
    loader = DataLoader(Mortal(8, tmp_path), 1, shuffle=False, num_workers=1, worker_restarts=1, endless=True)
    batches = iter(loader)
    taken = [next(batches).item() for _ in range(4)]
    die(tmp_path, 3, 1)  # the worker is not at position 11 yet
    taken += [next(batches).item() for _ in range(8)]
    die(tmp_path, 3, 2)
    with pytest.raises(DataError, match=r"samples \[3\] \(from position 19\)"):
        taken += [next(batches).item() for _ in range(8)]
    assert taken == [*range(8), *range(4)]
    loader.close()


def test_a_sample_that_leaves_by_an_exception_is_an_error_at_once() -> None:
    loader = DataLoader(Numbers(40, {7: "leave"}), 2, shuffle=False, num_workers=2)
    with pytest.raises(DataError, match=r"samples \[6, 7\] was broken off by SystemExit\(3\) \(loader worker 1 of 2"):
        list(loader)
    loader.close()


def test_a_worker_killed_in_the_middle_of_a_large_batch_is_replaced() -> None:
    loader = DataLoader(Blobs(100), 1, num_workers=1, endless=True, collate_fn=as_list, prefetch_factor=2)
    batches = iter(loader)
    next(batches)
    pool = loader._pool
    assert pool is not None
    with pool._changed:  # holds up the receiver, so that the worker is stuck in the middle of its next write
        time.sleep(0.5)
        os.kill(pids(loader)[0], signal.SIGKILL)
    assert all(len(batch[0]) == 30_000_000 for batch in itertools.islice(batches, 5))
    assert loader.take_stats().worker_restarts == 1
    loader.close()


def test_a_worker_that_dies_in_evaluation_is_replaced(tmp_path: Path) -> None:
    loader = EvalLoader(Mortal(10, die(tmp_path, 4, 1)), 2, num_workers=2)
    assert [batch.tolist() for batch in loader] == [[n, n + 1] for n in range(0, 10, 2)]
    loader.close()


def test_what_a_worker_leaves_behind_does_not_stop_its_replacement(tmp_path: Path) -> None:
    """A child of its own holds its sockets open after its death, so that a batch on its way is waited for in vain."""

    class Forking(Mortal):
        def __getitem__(self, index: int) -> Any:
            if list(self.folder.glob(f"{index}-*")):
                time.sleep(0.5)  # until batch 0 has arrived
                child = os.fork()
                if child == 0:
                    time.sleep(600)
                    os._exit(0)
                (self.folder / "child").write_text(str(child))
            return super().__getitem__(index)

    loader = DataLoader(Forking(10, die(tmp_path, 3, 1)), 1, shuffle=False, num_workers=1, timeout=60)
    batches = iter(loader)
    pool = loader._pool
    assert pool is not None
    with pool._changed:  # holds up the receiver, so that the batches 1 and 2 are not read before the worker is dead
        wait_until(lambda: (tmp_path / "child").exists() and not pool._workers[0]._process.is_alive())
    try:
        assert [batch.item() for batch in batches] == list(range(10))
    finally:
        loader.close()
        os.kill(int((tmp_path / "child").read_text()), signal.SIGKILL)
