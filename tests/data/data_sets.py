"""Datasets for the tests of the loaders: at the top of a module, so that a worker of any kind can have them."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset


class Numbers(Dataset[Any]):
    """The index as a tensor, and for some indices something special instead."""

    def __init__(self, samples: int, special: dict[int, str] | None = None) -> None:
        self.samples = samples
        self.special = special or {}

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> Any:
        what = self.special.get(index)
        if what == "raise":
            raise KeyError("no such thing")
        if what in ("die", "exit"):
            time.sleep(0.5)  # until the batches before this one have arrived
        if what == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if what == "exit":
            os._exit(7)
        if what == "leave":
            raise SystemExit(3)
        if what == "sleep":
            time.sleep(600)
        return torch.tensor(index)


class Mortal(Numbers):
    """Numbers, some of which end the process that loads them, as often as a folder still has a file for it.

    Args:
        samples: How many.
        folder: Holds a file `<index>-<any>` for each death that is left.
        how: `kill` or `exit`.
    """

    def __init__(self, samples: int, folder: Path, how: str = "kill") -> None:
        super().__init__(samples)
        self.folder = folder
        self.how = how

    def __getitem__(self, index: int) -> Any:
        for left in self.folder.glob(f"{index}-*"):
            left.unlink()
            os.kill(os.getpid(), signal.SIGKILL) if self.how == "kill" else os._exit(7)
        return torch.tensor(index)


class Unsendable(Numbers):
    def __getitem__(self, index: int) -> Any:
        return lambda: index


class Blobs(Numbers):
    """Much more than fits into a socket; the worker is killed while it waits for somebody to read."""

    def __getitem__(self, index: int) -> Any:
        return b"x" * 30_000_000


class About(Numbers):
    """What a worker process looks like from inside."""

    def __getitem__(self, index: int) -> Any:
        info = torch.utils.data.get_worker_info()
        ignored = [signal.getsignal(each) == signal.SIG_IGN for each in (signal.SIGINT, signal.SIGTERM)]
        blocked = len(signal.pthread_sigmask(signal.SIG_BLOCK, []))
        return (info.id if info else -1), torch.get_num_threads(), os.getpid(), all(ignored), blocked


def as_list(samples: list[Any]) -> list[Any]:
    return samples
