"""Loading: RN-04, RN-06, SH-04, SH-06, ME-03, and AS-09 as far as loader processes are concerned."""

from __future__ import annotations

import os
import random
import signal
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from case_tools import PARTS, part
from support import assert_same, compare, endure, global_batches, kept, kill_at, start
from torch.utils.data import Dataset, get_worker_info

from framework.data import DataLoader, EvalLoader


class Draws(Dataset[Any]):
    """Index, epoch-free, with the worker that loads it and what it draws."""

    def __init__(self, samples: int = 24) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> Any:
        worker = get_worker_info()
        drawn = (
            random.random(),
            np.random.standard_normal(),
            torch.rand(1).item(),
            torch.distributions.Normal(0, 1).sample().item(),
        )
        return index, (-1 if worker is None else worker.id), drawn


def as_list(samples: list[Any]) -> list[Any]:
    return samples


def table(seed: int, workers: int, is_persistent: bool) -> list[dict[int, tuple[Any, int]]]:
    """What was drawn for each sample, and by which worker, in each of three epochs."""
    epochs, options = [], {"seed": seed, "num_workers": workers, "collate_fn": as_list}
    loader = DataLoader(Draws(), 4, **options)
    for epoch in range(3):
        if not is_persistent:
            loader.close()
            loader = DataLoader(Draws(), 4, **options, position=24 * epoch)
        epochs.append({index: (drawn, worker) for batch in loader for index, worker, drawn in batch})
    loader.close()
    return epochs


@pytest.mark.parametrize("is_persistent", [True, False])
def test_rn_04_every_sample_of_every_epoch_has_random_numbers_of_its_own(is_persistent: bool) -> None:
    """The framework's worker seeding gives every worker or every epoch the same augmentation."""
    epochs = table(0, 2, is_persistent)
    drawn = [number for epoch in epochs for draws, _ in epoch.values() for number in draws]
    assert len(drawn) == len(set(drawn)) == 3 * 24 * 4  # whatever the epoch, the worker, the sample or the library
    assert {worker for epoch in epochs for _, worker in epoch.values()} == {0, 1}
    assert table(0, 2, is_persistent) == epochs
    without = [{index: draws for index, (draws, _) in epoch.items()} for epoch in table(0, 0, is_persistent)]
    assert without == [{index: draws for index, (draws, _) in epoch.items()} for epoch in epochs]


@pytest.mark.parametrize("rounds", [2, pytest.param(3, marks=pytest.mark.soak)])
def test_rn_06_neither_a_repetition_nor_the_number_of_workers_changes_a_result(rounds: int, tmp_path: Path) -> None:
    """Same seed, different result: number of workers or a repeat run changes it."""
    words = ("+recipe=job", "trainer.max_steps=12")
    runs = {
        f"w{workers}-{number}": (f"loader.num_workers={workers}",) for workers in (0, 2) for number in range(rounds)
    }
    runs["other"] = ("loader.num_workers=0", "seed=1")
    started = [start(*words, *more, f"run.name={name}", cwd=tmp_path) for name, more in runs.items()]
    for one in started:
        one.ends(0, timeout=120)
    root = tmp_path / "runs"
    for name in list(runs)[1:-1]:
        assert_same(root / "w0-0", root / name)
    assert compare(root / "w0-0", root / "other")


@pytest.mark.parametrize("recipe", ["job.Job", f"{PARTS}.SampledJob"])
def test_sh_04_each_epoch_has_its_order_and_each_rank_its_share(recipe: str, tmp_path: Path) -> None:
    """Nobody calls set_epoch: same order each epoch; or users' own DistributedSampler is wrapped twice."""
    words = ("+recipe=job", f"recipe._target_={recipe}", "~trainer.max_steps", "trainer.max_epochs=3", "run.name=r")
    endure(*words, "trainer.global_batch_size=16", part("Synchronous"), kill_at(8, "forward"), cwd=tmp_path, ranks=2)
    shares = [kept(tmp_path / "runs/r", rank) for rank in range(2)]
    orders = []
    for epoch in range(3):
        steps = range(6 * epoch + 1, 6 * epoch + 7)
        ids = [[number for step in steps for number in share[step].ids] for share in shares]
        assert all(share[step].epoch == epoch for share in shares for step in steps)
        assert not set(ids[0]) & set(ids[1]) and sorted(ids[0] + ids[1]) == list(range(96))
        orders.append(ids)
    assert all(len(share) == 18 for share in shares)
    assert orders[0] != orders[1] != orders[2] != orders[0]


def test_sh_06_the_rest_of_an_epoch_is_dropped_for_all_ranks_at_once(tmp_path: Path) -> None:
    """The remainder is dropped per rank instead of globally; ranks drift into different epochs and one global batch has
    a sample twice."""
    words = ("+recipe=job", "data.train.samples=10", "loader.epoch_end=drop", "~trainer.max_steps")
    words = (*words, "trainer.max_epochs=4", "trainer.global_batch_size=6", "callbacks.async_checkpoint.every=1")
    words = (*words, part("Synchronous"))
    start(*words, "run.name=u", cwd=tmp_path, ranks=2).ends(0)
    endure(*words, kill_at(2, "forward"), "run.name=r", cwd=tmp_path, ranks=2)
    run = tmp_path / "runs/r"
    assert_same(tmp_path / "runs/u", run, ranks=2)
    batches = global_batches(run, 2)
    assert sorted(batches) == [1, 2, 3, 4]
    for step, ids in batches.items():
        assert [kept(run, rank)[step].epoch for rank in range(2)] == [step - 1] * 2
        assert max(Counter(ids).values()) == 1 and len(ids) == 6


def test_me_03_no_process_file_or_shared_memory_piles_up() -> None:
    """Worker processes or shared memory pile up over epochs, validations or restarts in one process."""
    this = psutil.Process()
    for restart in range(2):
        before = (set(this.children(recursive=True)), this.num_fds(), sorted(os.listdir("/dev/shm")))
        loader = DataLoader(Draws(), 8, num_workers=2)
        evaluation = EvalLoader(Draws(12), 4, num_workers=2)
        for _ in range(50):
            assert len(list(loader)) == len(list(evaluation)) == 3
            assert len(set(this.children(recursive=True)) - before[0]) <= 4
        loader.close()
        evaluation.close()
        after = (set(this.children(recursive=True)), this.num_fds(), sorted(os.listdir("/dev/shm")))
        if restart:  # the first one may start what every process has once
            assert after == before


def test_as_09_workers_are_replaced_beside_threads_that_write(tmp_path: Path) -> None:
    """Background thread and forked loader workers deadlock now and then; run hangs with 0 % CPU."""
    is_over = threading.Event()
    state = {"weights": torch.randn(300_000), "step": 1}

    def save(number: int) -> None:
        while not is_over.is_set():
            torch.save(state, tmp_path / f"{number}.pt")

    threads = [threading.Thread(target=save, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    try:
        loader = DataLoader(
            Draws(400), 4, num_workers=2, endless=True, worker_restarts=100, timeout=60, collate_fn=as_list
        )
        batches, seen = iter(loader), []
        for number in range(100):
            if number % 8 == 0:
                assert loader._pool is not None
                os.kill(loader._pool.pids[number // 8 % 2], signal.SIGKILL)
            seen += [index for index, _, _ in next(batches)]
        loader.close()
    finally:
        is_over.set()
        for thread in threads:
            thread.join()
    assert sorted(seen) == list(range(400))
