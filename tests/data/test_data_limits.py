"""Limits of the machine: raised where they may be, and told before a run dies of them."""

from __future__ import annotations

import logging
import os
import resource
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from data_sets import Numbers, as_list
from torch.utils.data import SequentialSampler

from framework.data import DataLoader
from framework.data.limits import MOST_FILES, Limits
from framework.errors import DataError

HERE = Path(__file__).parent


def shared(*sizes: int) -> dict[str, torch.Tensor]:
    return {str(number): torch.zeros(size, dtype=torch.uint8).share_memory_() for number, size in enumerate(sizes)}


def python(code: str, *before: str) -> subprocess.CompletedProcess[str]:
    """Runs code in a process that has the datasets of the tests."""
    env = {**os.environ, "PYTHONPATH": f"{HERE.parents[1]}:{HERE}", "OMP_NUM_THREADS": "1"}
    command = [*before, sys.executable, "-c", code]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env=env, check=False)


class Asked(Numbers):
    """What a worker may have open."""

    def __getitem__(self, index: int) -> Any:
        return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def test_the_limit_of_open_files_is_raised_for_the_process_and_its_workers() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (512, hard))
    try:
        loader = DataLoader(Asked(2), 2, num_workers=1, collate_fn=as_list)
        assert next(iter(loader)) == [min(hard, MOST_FILES)] * 2
        loader.close()
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (min(hard, MOST_FILES), hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_too_little_shared_memory_is_told_with_the_numbers(caplog: pytest.LogCaptureFixture) -> None:
    limits = Limits(6)
    limits._free = 10_000_000  # as in a container
    batch = shared(1_000_000, 500_000)
    with caplog.at_level(logging.WARNING):
        limits.check(batch)
        limits.check(batch)
    (told,) = caplog.messages
    assert "/dev/shm had 10.0 MB free, and up to 8 batches of 1.5 MB are under way" in told and "--shm-size" in told


def test_enough_of_everything_is_not_told(caplog: pytest.LogCaptureFixture) -> None:
    limits = Limits(6)
    big = torch.empty(10**13, dtype=torch.uint8, device="meta")  # where no shared memory is taken
    limits.check({**shared(1000, 1000), "elsewhere": big, "name": "x"})
    Limits(6, "/no/such/folder").check(shared(1000))
    assert caplog.messages == []


def test_too_few_open_files_are_told_with_the_numbers(caplog: pytest.LogCaptureFixture) -> None:
    limits = Limits(10)
    assert limits._files is not None
    limits._files = 100
    limits.check(shared(*[1] * 4))
    (told,) = caplog.messages
    assert "may have 100 files open, and up to 12 batches of 4 tensors" in told


def test_a_loader_looks_at_its_first_batch() -> None:
    loader = DataLoader(Numbers(8), 2, num_workers=1)
    batches = iter(loader)
    pool = loader._pool
    assert pool is not None and not pool._limits._is_checked
    next(batches)
    assert pool._limits._is_checked
    loader.close()


@pytest.mark.skipif(shutil.which("unshare") is None or os.geteuid() != 0, reason="needs a mount of its own")
class Sparse(Numbers):
    """Tensors that have no memory of their own."""

    def __getitem__(self, index: int) -> Any:
        return (torch.eye(3) * index).to_sparse()


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")  # torch says so wherever one arrives
def test_a_loader_looks_at_sparse_tensors_too() -> None:
    loader = DataLoader(Sparse(3), 3, shuffle=False, num_workers=1, collate_fn=as_list)
    (batch,) = loader
    loader.close()
    assert [each.to_dense().diagonal().tolist() for each in batch] == [[index] * 3 for index in range(3)]


def test_shared_memory_that_is_full_is_an_error_that_says_so() -> None:
    code = """
import torch
from data_sets import Numbers, as_list
from framework.data import DataLoader
from framework.errors import DataError
class Big(Numbers):
    def __getitem__(self, index):
        return torch.zeros(6_000_000, dtype=torch.uint8)
try:
    list(DataLoader(Big(12), 1, num_workers=1, worker_restarts=1))
except DataError as error:
    print(error)
"""
    mount = 'mount -t tmpfs -o size=8m none /dev/shm && exec "$@"'
    done = python(code, "unshare", "-m", "sh", "-c", mount, "sh")
    if "mount" in done.stderr and done.returncode:
        pytest.skip("no mounts here")
    assert "Shared memory is full: enlarge /dev/shm, or lower loader.num_workers" in done.stdout, done.stderr
    assert "/dev/shm had 8.4 MB free, and up to 6 batches of 6.0 MB are under way" in done.stderr


def test_a_worker_that_takes_in_no_task_is_not_waited_for_without_end() -> None:
    """Lists of ids are much larger than what fits into a socket."""
    dataset = Numbers(400_000, {0: "sleep"})
    loader = DataLoader(
        dataset, 100_000, sampler=SequentialSampler(dataset), num_workers=1, prefetch_factor=2, timeout=0.5
    )
    with pytest.raises(DataError, match="no batch for"):
        next(iter(loader))
    loader.close()
