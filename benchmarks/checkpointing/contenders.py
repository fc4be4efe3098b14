"""Who saves, each as its documentation shows it.

A contender is made once, saves several times into new folders, and tells when a save is durable. `fence` is what has
to be called before the weights may change; those that need none have copied before `save` returns.
"""

from __future__ import annotations

import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

State = dict[str, Any]


class Contender(ABC):
    """One way to save."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.durable_at: float | None = None  # perf_counter when the last save was, as far as it says so itself

    def mark(self, *_: Any) -> None:
        """The save is durable now."""
        self.durable_at = time.perf_counter()

    def prepare(self, state: State) -> None:  # noqa: B027
        """What may be done before the first save."""

    @abstractmethod
    def save(self, state: State, step: int) -> None:
        """Blocks as long as it must."""

    def fence(self) -> None:  # noqa: B027
        """Returns when the weights may change."""

    def is_done(self) -> bool:
        """Whether the save is durable."""
        return True

    def wait(self) -> None:  # noqa: B027
        """Returns when the save is durable."""

    def close(self) -> None:  # noqa: B027
        """Ends what is still running."""


class TorchSave(Contender):
    """torch.save into one file, forced to disk."""

    def save(self, state: State, step: int) -> None:
        with open(self.folder / f"{step}.pt", "wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())


class DcpSave(Contender):
    """torch.distributed.checkpoint.save."""

    def save(self, state: State, step: int) -> None:
        dcp.save(state, checkpoint_id=str(self.folder / str(step)))


class DcpAsync(Contender):
    """torch.distributed.checkpoint.async_save."""

    def __init__(self, folder: Path, kind: str) -> None:
        super().__init__(folder)
        from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

        self._kind = AsyncCheckpointerType(kind)
        self._future: Any = None
        dist.init_process_group("cpu:gloo", init_method=f"file://{folder}/rendezvous", rank=0, world_size=1)

    def save(self, state: State, step: int) -> None:
        answer = dcp.async_save(state, checkpoint_id=str(self.folder / str(step)), async_checkpointer_type=self._kind)
        self._future = getattr(answer, "upload_completion", answer)
        self._future.add_done_callback(self.mark)

    def is_done(self) -> bool:
        return self._future is None or bool(self._future.done())

    def wait(self) -> None:
        if self._future is not None:
            self._future.result()

    def close(self) -> None:
        dist.destroy_process_group()


class Lightning(Contender):
    """Lightning's AsyncCheckpointIO around its TorchCheckpointIO."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        from lightning.pytorch.plugins.io import AsyncCheckpointIO, TorchCheckpointIO

        self._plugin = AsyncCheckpointIO(TorchCheckpointIO())
        self._path = folder / "none"

    def save(self, state: State, step: int) -> None:
        self._path = self.folder / f"{step}.ckpt"
        self._plugin.save_checkpoint(state, str(self._path))
        # its executor has one thread: what is handed in now ends after the save
        self._mark = self._plugin._executor.submit(self.mark)

    def is_done(self) -> bool:
        return bool(self._mark.done())

    def wait(self) -> None:
        self._mark.result()

    def close(self) -> None:
        self._plugin.teardown()


class TorchCheckpointing(Contender):
    """torch_checkpointing's CheckpointManager, which writes in a process of its own.

    Without O_DIRECT, its default: with it, closing a file of odd length fails (EINVAL).
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        from torch_checkpointing import AsyncCheckpointSaverConfig, CheckpointManager
        from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

        self._manager = CheckpointManager.Config(
            save=AsyncCheckpointSaverConfig(), storage_config=LocalFileSystemStorageConfig(use_direct_io=False)
        ).build()
        self._future: Any = None

    def prepare(self, state: State) -> None:
        self._manager.prewarm_staging(state)

    def save(self, state: State, step: int) -> None:
        self._future = self._manager.save(str(self.folder / str(step)), state)

    def fence(self) -> None:
        with self._manager.lock():
            pass

    def is_done(self) -> bool:
        return self._future is None or bool(self._future.done())

    def wait(self) -> None:
        if self._future is not None:
            self._future.result(600)

    def close(self) -> None:
        self._manager.close()


class Ours(Contender):
    """This package's writer, alone."""

    def __init__(self, folder: Path, overlap: str) -> None:
        super().__init__(folder)
        from framework.checkpoint import CheckpointStore, CheckpointWriter
        from framework.distributed import Group, World

        world = World(0, 1, 0, 1, torch.device("cpu"))
        group = Group(world, timeout_seconds=600, name="checkpoint")
        self._writer = CheckpointWriter(
            CheckpointStore(folder / "checkpoints"), world, group, run="bench", attempt=1, token="bench",
            is_owner=lambda: True, timeout_seconds=600, overlap=overlap,
        )  # fmt: skip

    def prepare(self, state: State) -> None:
        from checkpointing.states import leaves

        self._settled = frozenset(key for key, _ in leaves(state))
        self._writer.prepare(self._state(state))

    def save(self, state: State, step: int) -> None:
        from framework.checkpoint import SaveHeader

        self._began = time.perf_counter()
        self._writer.start(self._state(state), SaveHeader(step=step))

    def fence(self) -> None:
        self._writer.fence(before_update=True)

    def is_done(self) -> bool:
        return not self._writer.busy

    def wait(self) -> None:
        for result in self._writer.wait(600):
            assert result.committed, result.error
            self.durable_at = self._began + result.stall_seconds + result.persist_seconds

    def close(self) -> None:
        self._writer.close()

    def _state(self, state: State) -> Any:
        from framework.checkpoint import TrainState

        return TrainState(state, settled=self._settled)


MAKERS: dict[str, Callable[[Path], Contender]] = {
    "torch.save + fsync": TorchSave,
    "dcp.save": DcpSave,
    "dcp.async_save thread": lambda folder: DcpAsync(folder, "thread"),
    "dcp.async_save process": lambda folder: DcpAsync(folder, "process"),
    "Lightning AsyncCheckpointIO": Lightning,
    "torch_checkpointing": TorchCheckpointing,
    "ours, overlap on": lambda folder: Ours(folder, "on"),
    "ours, overlap off": lambda folder: Ours(folder, "off"),
}
