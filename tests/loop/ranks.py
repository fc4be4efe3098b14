"""Real ranks for tests: processes joined by gloo, bounded, each a child of a server that has imported torch once."""

from __future__ import annotations

import datetime
import multiprocessing
import os
import pickle
import tempfile
import traceback
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from framework.distributed import World

PRELOAD = ["framework.trainer", "framework.callbacks.async_checkpoint", "tests.loop.runs"]


def in_ranks(
    size: int, body: Callable[..., Any], *arguments: Any, timeout: float = 90.0, dies: bool = False
) -> list[Any]:
    """Runs `body(world, *arguments)` in `size` processes and returns what each rank returned.

    Args:
        size: Number of ranks; 1 gives a process of its own without a group.
        body: A function of a test module.
        *arguments: What can be pickled.
        timeout: Seconds in all.
        dies: Whether every rank is expected to be killed; then the answers are exit codes.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    with tempfile.TemporaryDirectory() as folder:
        pipes, processes = [], []
        for rank in range(size):
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(target=_rank_main, args=(rank, size, folder, theirs, body, arguments))
            process.start()
            theirs.close()
            pipes.append(ours)
            processes.append(process)
        try:
            answers = [_answer(rank, pipe, timeout, dies) for rank, pipe in enumerate(pipes)]
        finally:
            for process in processes:
                process.join(10)
                if process.is_alive():
                    process.kill()
                process.join()
        return [process.exitcode for process in processes] if dies else answers


def _answer(rank: int, pipe: Any, timeout: float, dies: bool) -> Any:
    assert pipe.poll(timeout), f"rank {rank} gave no answer within {timeout} s"
    try:
        error, value = pickle.loads(pipe.recv_bytes())
    except EOFError:
        assert dies, f"rank {rank} died"
        return None
    assert error is None, f"rank {rank}: {error}"
    assert not dies, f"rank {rank} was to be killed and returned {value!r}"
    return value


def _rank_main(rank: int, size: int, folder: str, pipe: Any, body: Callable[..., Any], arguments: Any) -> None:
    try:
        warnings.simplefilter("error")
        torch.set_num_threads(1)
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(size))
        if size > 1:
            store = dist.FileStore(f"{folder}/store", size)
            wait = datetime.timedelta(seconds=30)
            dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=wait)
        answer = body(World(rank, size, rank, size, torch.device("cpu")), *arguments)
        pipe.send_bytes(pickle.dumps((None, answer)))  # plain pickle: tensors by value, since this process ends
    except BaseException:
        pipe.send_bytes(pickle.dumps((traceback.format_exc(), None)))
    finally:
        pipe.close()
        os._exit(0)  # no farewell to ranks that a test has left alone
