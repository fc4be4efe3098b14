"""What the tests of broken storage and killed processes share: a store to start from, and what must hold after it."""

from __future__ import annotations

import os
import shutil
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from checkpoint_support import make_writer, save, small_state
from syscalls import die_with_parent

from framework.checkpoint import CheckpointReader, CheckpointStore, SaveHeader, TrainState
from framework.checkpoint.retention import Keep
from framework.checkpoint.verify import check_bytes, check_structure
from framework.distributed import Group, World

KEEP = Keep(last=2)


def beginning(folder: Path) -> Path:
    """A store with the checkpoints 1 and 2 of attempt 1, what an aborted save of 3 left, and a half-deleted one."""
    path = folder / "checkpoints"
    store = CheckpointStore(path)
    for step in (1, 2, 3, 4):
        save(store, step)
    (store.folder(3) / ".metadata").unlink()
    (store.folder(4) / ".metadata").unlink()
    os.rename(store.folder(4), path / f".trash-{store.folder(4).name}-0a1b2c3d")
    return path


def assert_all_whole(store: CheckpointStore) -> int:
    """Every byte of everything that is published is right; returns the newest step, 0 if there is none."""
    found = store.list()
    for checkpoint in found:
        manifest, _ = check_structure(checkpoint.path, checkpoint.step)
        check_bytes(checkpoint.path, manifest)
    return found[0].step if found else 0


def assert_restores(path: Path, world: World, group: Group, state: Callable[[int], TrainState]) -> int:
    """The newest checkpoint is bit for bit the state of its step; returns the step."""
    reader = CheckpointReader(CheckpointStore(path), world, group)
    found = reader.newest_valid()
    assert found is not None and not reader.rejected
    expected = state(found.step)
    loaded = {name: torch.zeros_like(value) for name, value in flat(expected.tensors).items()}
    reader.load(found, loaded)
    for name, value in flat(expected.tensors).items():
        assert torch.equal(loaded[name], value), name
    assert reader.read_shared(found) == expected.shared
    own = reader.read_rank(found)
    assert own is not None and own.keys() == expected.rank.keys()
    assert all(torch.equal(torch.as_tensor(own[key]), torch.as_tensor(value)) for key, value in expected.rank.items())
    return found.step


def flat(tensors: Any, prefix: str = "") -> dict[str, torch.Tensor]:
    """Nested tensors under their dotted keys."""
    if isinstance(tensors, torch.Tensor):
        return {prefix.rstrip("."): tensors}
    return {k: v for name, inner in tensors.items() for k, v in flat(inner, f"{prefix}{name}.").items()}


def attempt(
    path: Path,
    number: int,
    steps: list[int],
    *,
    world: World,
    group: Group,
    state: Callable[[int], TrainState] = small_state,
    **options: Any,
) -> None:
    """What an attempt does: sweeps, prepares, saves with retention. Fails if a save does."""
    store = CheckpointStore(path)
    if world.is_main:
        store.sweep(number)
    writer = make_writer(store, world=world, group=group, attempt=number, keep=KEEP, **options)
    writer.prepare(state(0))
    for step in steps:
        writer.start(state(step), SaveHeader(step))
        for result in writer.wait(60):
            assert result.committed, result.error
    writer.close()


def renewed(source: Path, target: Path) -> Path:
    """A fresh copy of a store in the place of another."""
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(source, target, symlinks=True)
    return target


def join(rank: int, size: int, rendezvous: Path, seconds: float, join_seconds: float = 30.0) -> tuple[World, Group]:
    """Makes this process one of several ranks, with a group for checkpoints that waits so many seconds at most."""
    import datetime

    torch.set_num_threads(1)
    store = dist.FileStore(str(rendezvous), size)
    limit = datetime.timedelta(seconds=join_seconds)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=limit)
    world = World(rank, size, rank, size, torch.device("cpu"))
    return world, Group(world, timeout_seconds=seconds, name="checkpoint")


def fork(body: Callable[[], object]) -> int:
    """Runs it in a child, which dies with this process; an exception is exit code 1."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            die_with_parent()
            body()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(code)
    return pid


def ended(pid: int, seconds: float) -> int:
    """The exit code of a child, once it has ended.

    Raises:
        AssertionError: It did not in time.
    """
    deadline = time.monotonic() + seconds
    while True:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > deadline:
            os.kill(pid, 9)
            os.waitpid(pid, 0)
            raise AssertionError(f"process {pid} did not end within {seconds} s")
        time.sleep(0.005)
