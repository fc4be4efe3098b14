"""Worker processes: none is left behind, none is lost to a signal, and no failure of one is a hang."""

from __future__ import annotations

import gc
import itertools
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from data_sets import About, Numbers, Unsendable, as_list

from framework.data import DataLoader, EvalLoader, Token
from framework.errors import DataError

HERE = Path(__file__).parent
BOUND_SECONDS = 120.0


def is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    except psutil.NoSuchProcess:
        return False


def wait_until(condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + BOUND_SECONDS
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)
    return condition()


def pids(loader: Any) -> list[int]:
    return list(loader._pool.pids)


class Started:
    """A process of `loader_process.py` in a process group of its own, and the pids of its workers."""

    def __init__(self, output: Path, method: str, how: str) -> None:
        self.output = output
        with output.open("w") as file:
            self.process = subprocess.Popen(
                [sys.executable, "loader_process.py", method, how],
                cwd=HERE,
                env={**os.environ, "PYTHONPATH": f"{HERE.parents[1]}", "OMP_NUM_THREADS": "1"},
                stdout=file,
                start_new_session=True,
            )
        assert wait_until(lambda: bool(self.lines()))
        word, *numbers = self.lines()[0].split()
        assert word == "ready"
        self.workers = [int(each) for each in numbers]

    def lines(self) -> list[str]:
        """The whole lines that it has written."""
        return self.output.read_text().split("\n")[:-1]


@pytest.fixture
def begin(tmp_path: Path) -> Iterator[Callable[[str, str], Started]]:
    running: list[Started] = []

    def start(method: str, how: str) -> Started:
        running.append(Started(tmp_path / "output", method, how))
        return running[-1]

    yield start
    for each in running:
        each.process.kill()
        each.process.wait(BOUND_SECONDS)


@pytest.mark.parametrize("method", ["fork", "forkserver"])
def test_no_busy_worker_outlives_a_killed_parent(begin: Callable[[str, str], Started], method: str) -> None:
    started = begin(method, "busy")
    assert all(is_running(pid) for pid in started.workers)
    started.process.kill()
    assert wait_until(lambda: not any(is_running(pid) for pid in started.workers))


def test_workers_outlive_the_thread_that_started_them() -> None:
    loader = DataLoader(Numbers(100), 1, endless=True, num_workers=1)
    started: list[Any] = []
    thread = threading.Thread(target=lambda: started.append(iter(loader)))
    thread.start()
    thread.join()
    time.sleep(0.2)  # for a worker that would die with it
    assert [each.item() for each in itertools.islice(started[0], 20)] == loader.fetch.ids(Token(0, 1, 20)).tolist()
    loader.close()


@pytest.mark.parametrize("method", ["fork", "forkserver"])
def test_a_signal_to_the_whole_group_stops_no_worker_before_the_parent_does(
    begin: Callable[[str, str], Started], method: str
) -> None:
    started = begin(method, "signals")
    os.killpg(started.process.pid, signal.SIGTERM)
    time.sleep(0.3)  # for a worker that would die of it
    os.killpg(started.process.pid, signal.SIGINT)
    assert started.process.wait(BOUND_SECONDS) == 0
    assert started.lines()[1:] == ["went on", "closed", "done"]
    assert not any(is_running(pid) for pid in started.workers)


@pytest.mark.parametrize("how", ["leave", "child"])
def test_a_process_that_ends_without_closing_ends_its_workers(begin: Callable[[str, str], Started], how: str) -> None:
    started = begin("fork", how)
    assert started.process.wait(BOUND_SECONDS) == 0
    assert started.lines()[1:] == ["done"]
    assert not any(is_running(pid) for pid in started.workers)


def test_a_batch_that_takes_too_long_names_worker_and_samples_and_shows_where_it_hangs(
    capfd: pytest.CaptureFixture[str],
) -> None:
    loader = DataLoader(Numbers(40, {5: "sleep"}), 2, shuffle=False, num_workers=2, timeout=0.5)
    batches = iter(loader)
    workers = pids(loader)
    with pytest.raises(DataError, match=r"no batch for .*loader worker 0 of 2, pid \d+ has not finished .*\[4, 5\]"):
        list(batches)
    assert not any(is_running(pid) for pid in workers)
    stack = capfd.readouterr().err
    assert stack.count("in _answer") == stack.count("in __getitem__") == 1  # of that worker alone


def test_each_worker_is_set_up_by_the_function_that_torch_knows() -> None:
    def set_up(number: int) -> None:
        torch.set_num_threads(2 + number)

    loader = DataLoader(About(8), 1, num_workers=2, collate_fn=as_list, worker_init_fn=set_up)
    assert {(number, threads) for batch in loader for number, threads, *_ in batch} == {(0, 2), (1, 3)}
    loader.close()


def test_a_batch_that_cannot_be_sent_is_an_error_that_names_it() -> None:
    loader = DataLoader(Unsendable(4), 2, shuffle=False, num_workers=1, collate_fn=as_list)
    with pytest.raises(DataError, match=r"batch of the samples \[0, 1\] cannot be sent from a worker"):
        next(iter(loader))


def test_a_dataset_that_a_new_process_cannot_have_is_named() -> None:
    class Local(Numbers):
        pass

    loader = DataLoader(Local(4), 2, num_workers=1, multiprocessing_context="forkserver")
    with pytest.raises(DataError, match=r"Local and its collate function cannot be sent.*num_workers=0"):
        iter(loader)


def test_seek_keeps_the_same_processes_and_starts_no_more() -> None:
    loader = DataLoader(Numbers(50), 2, endless=True, num_workers=2)
    batches = iter(loader)
    before, mine = pids(loader), set(psutil.Process().children())
    for position in range(0, 100, 10):
        loader.seek(position)
        batch = next(batches)
        assert batch.tolist() == loader.ids(position).tolist()
    pool = loader._pool
    assert pool is not None
    assert set(pool._batches) <= set(pool._sent)  # nothing that was prefetched before a seek is kept
    assert pids(loader) == before
    assert set(psutil.Process().children()) == mine
    loader.close()
    loader.close()
    assert not any(is_running(pid) for pid in before)


def test_a_second_iteration_takes_the_workers_and_the_first_says_so() -> None:
    loader = EvalLoader(Numbers(8), 2, num_workers=1)
    first = iter(loader)
    next(first)
    assert [batch.tolist() for batch in loader] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    with pytest.raises(RuntimeError, match="one iteration at a time"):
        next(first)
    loader.close()


def test_a_loader_that_is_dropped_ends_its_workers() -> None:
    loader = DataLoader(Numbers(100), 2, num_workers=2)
    batches = iter(loader)
    next(batches)
    workers = pids(loader)
    gc.disable()
    try:
        del loader, batches
        assert not any(is_running(pid) for pid in workers)
    finally:
        gc.enable()


def test_signal_handlers_of_the_process_stay_as_they_were() -> None:
    def handlers() -> list[Any]:
        return [signal.getsignal(each) for each in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGQUIT)]

    before, mask = handlers(), signal.pthread_sigmask(signal.SIG_BLOCK, [])
    loader = DataLoader(Numbers(10), 2, num_workers=2)
    list(loader)
    assert handlers() == before
    assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == mask
    loader.close()


@pytest.mark.parametrize("method", ["fork", "forkserver"])
def test_a_worker_has_one_thread_a_number_and_ignores_the_signals_of_a_run(method: str) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        loader = DataLoader(About(8), 1, num_workers=2, collate_fn=as_list, multiprocessing_context=method)
        numbers, threads, processes, are_ignored, blocked = zip(*(batch[0] for batch in loader), strict=True)
    finally:
        torch.set_num_threads(before)
    assert set(numbers) == {0, 1}
    assert set(threads) == {1}
    assert sorted(set(processes)) == sorted(pids(loader))
    assert all(are_ignored)
    assert set(blocked) == {0}
    loader.close()


def test_the_default_number_of_workers_is_this_ranks_share(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)))
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert DataLoader(Numbers(4)).num_workers == 6
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    loader = DataLoader(Numbers(4))
    assert (loader.num_workers, loader.prefetch_factor, loader.persistent_workers) == (3, 4, True)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "16")
    assert EvalLoader(Numbers(4)).num_workers == 1


def test_a_worker_init_fn_that_fails_is_an_error_with_its_cause_at_once() -> None:
    def init(worker: int) -> None:
        raise KeyError("no such license")

    loader = DataLoader(Numbers(6), 2, num_workers=2, worker_init_fn=init)
    with pytest.raises(DataError, match=r"worker_init_fn failed: KeyError: 'no such license'.*worker 0 of 2") as caught:
        next(iter(loader))
    assert "in init" in str(caught.value.__cause__)
    assert loader.take_stats().worker_restarts == 0
