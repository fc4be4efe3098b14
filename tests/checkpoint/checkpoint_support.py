"""What the tests of the checkpoint floor share: states, one-line saves, and real ranks."""

from __future__ import annotations

import datetime
import hashlib
import multiprocessing
import os
import signal
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from framework.checkpoint import CheckpointReader, CheckpointStore, CheckpointWriter, SaveHeader, SaveResult, TrainState
from framework.distributed import Group, World

SOLO = World(0, 1, 0, 1, torch.device("cpu"))


def solo_group() -> Group:
    return Group(SOLO, timeout_seconds=20, name="checkpoint")


def make_writer(
    store: CheckpointStore,
    *,
    world: World = SOLO,
    group: Group | None = None,
    attempt: int = 1,
    is_owner: Callable[[], bool] = lambda: True,
    **options: Any,
) -> CheckpointWriter:
    return CheckpointWriter(
        store,
        world,
        group or solo_group(),
        run="a-run",
        attempt=attempt,
        token=f"token-{attempt}",
        is_owner=is_owner,
        **{"timeout_seconds": 30.0, **options},
    )


def make_reader(store: CheckpointStore) -> CheckpointReader:
    return CheckpointReader(store, SOLO, solo_group())


def small_state(step: int) -> TrainState:
    """A model, a moment and a counter whose values depend on the step."""
    generator = torch.Generator().manual_seed(step)
    weight = torch.randn(40, 30, generator=generator)
    tensors = {
        "model": {"fc.weight": weight, "fc.bias": torch.full((30,), float(step))},
        "optimizer": {"main": {"state": {"fc.weight": {"exp_avg": weight * 2, "step": torch.tensor(float(step))}}}},
    }
    return TrainState(tensors, {"step": step, "names": ["a", "b"]}, {"rng": torch.arange(5) + step})


def blank(tensors: Any) -> Any:
    """The same nested tensors, all zero."""
    if isinstance(tensors, torch.Tensor):
        return torch.zeros(tensors.shape, dtype=tensors.dtype)
    return {key: blank(value) for key, value in tensors.items()}


def leaves(tensors: Any) -> list[torch.Tensor]:
    return [tensors] if isinstance(tensors, torch.Tensor) else [t for v in tensors.values() for t in leaves(v)]


def save(store: CheckpointStore, step: int, *, attempt: int = 1, header: SaveHeader | None = None) -> SaveResult:
    """Saves `small_state(step)` and expects it to be committed."""
    result = save_and_close(make_writer(store, attempt=attempt), step, header)
    assert result.committed, result.error
    return result


def save_and_close(writer: CheckpointWriter, step: int, header: SaveHeader | None = None) -> SaveResult:
    """Saves `small_state(step)` as the last thing that a writer does; the result says how it went."""
    writer.start(small_state(step), header or SaveHeader(step, position=step * 8))
    (result,) = writer.wait(60)
    writer.close()
    return result


def assert_holds(store: CheckpointStore, step: int) -> None:
    """The newest good checkpoint is of this step, and bit for bit its state."""
    assert_finds(make_reader(store), step)


def assert_finds(reader: CheckpointReader, step: int) -> None:
    """What this reader takes for the newest good checkpoint is of this step, and bit for bit its state."""
    found = reader.newest_valid()
    assert found is not None and found.step == step
    expected = small_state(step)
    loaded = blank(expected.tensors)
    reader.load(found, loaded)
    for ours, theirs in zip(leaves(loaded), leaves(expected.tensors), strict=True):
        assert torch.equal(ours, theirs)
    assert reader.read_shared(found) == expected.shared


def snapshot(folder: Path) -> dict[str, str]:
    """Every path below a folder, with a digest of its bytes."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "folder"
        for path in sorted(folder.rglob("*"))
    }


def in_ranks(
    size: int, body: Callable[..., Any], *arguments: Any, timeout: float = 60.0, spared: int = -1
) -> list[Any]:
    """Runs `body(world, *arguments)` in real processes joined by gloo and returns what each rank returned.

    A rank that dies gives `None`, and must be the spared one.
    """
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        pipes, processes = [], []
        for rank in range(size):
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(target=_rank_main, args=(rank, size, folder, theirs, body, arguments))
            process.start()
            theirs.close()
            pipes.append(ours)
            processes.append(process)
        answers: list[Any] = []
        try:
            for rank, pipe in enumerate(pipes):
                assert pipe.poll(timeout), f"rank {rank} gave no answer within {timeout} s"
                try:
                    error, value = pipe.recv()
                except EOFError:
                    error, value = (None, None) if rank == spared else ("it died", None)
                assert error is None, f"rank {rank}: {error}"
                answers.append(value)
        finally:
            for process in processes:
                process.join(5)
                if process.is_alive():
                    process.kill()
                process.join()
        return answers


def _rank_main(rank: int, size: int, folder: str, pipe: Any, body: Callable[..., Any], arguments: Any) -> None:
    try:
        torch.set_num_threads(1)
        store = dist.FileStore(f"{folder}/store", size)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=datetime.timedelta(seconds=20))
        world = World(rank, size, rank, size, torch.device("cpu"))
        pipe.send((None, body(world, *arguments)))
    except BaseException:
        pipe.send((traceback.format_exc(), None))
    finally:
        pipe.close()
        os._exit(0)  # no farewell to ranks that a test has killed


def in_child(body: Callable[[], Any]) -> int:
    """Runs a function in a forked child; returns the exit code, negative for a signal."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            body()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    _, status = os.waitpid(pid, 0)
    return os.waitstatus_to_exitcode(status)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
