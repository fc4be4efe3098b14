"""Plain user code in the style that torch's tutorials publish, with `VolumeWriter` and `VolumeReader` put in."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from checkpoint_support import in_ranks
from support.storage import S3
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.checkpoint.stateful import Stateful
from torch.nn.parallel import DistributedDataParallel

from framework.checkpoint import VolumeReader, VolumeWriter, per_rank
from framework.distributed import World
from framework.volume import open_volume

FIRST, LAST = 997, 1001  # unpadded numbers of three and four digits: by name, step_999 would be the newest


class AppState(Stateful):
    """Model and optimizer as one, as in torch's tutorial."""

    def __init__(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model = model
        self.optimizer = optimizer

    def state_dict(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optim": optimizer}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state_dict["model"],
            optim_state_dict=state_dict["optim"],
        )


class Job:
    """A small training job as a user writes it."""

    def __init__(self, world: World, root: str, seed: int) -> None:
        self.world = world
        self.root = root
        torch.manual_seed(seed)
        net: torch.nn.Module = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))
        self.model = DistributedDataParallel(net) if world.size > 1 else net
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.group = dist.new_group(backend="gloo")
        torch.manual_seed(seed + 100 + world.rank)
        self.step = FIRST - 1

    def advance(self) -> None:
        loss = self.model(torch.randn(4, 8)).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.step += 1

    def state(self) -> dict[str, Any]:
        rng = per_rank(torch.get_rng_state())
        return {"app": AppState(self.model, self.optimizer), "step": self.step, "rng": rng}

    def load(self, folder: str) -> None:
        state = self.state()
        dcp.load(state, storage_reader=VolumeReader(f"{self.root}/{folder}"))
        self.step = state["step"]
        torch.set_rng_state(state["rng"].value)

    def weights(self) -> list[float]:
        return [value for parameter in self.model.parameters() for value in parameter.flatten().tolist()]


def newest(root: str) -> str:
    """The folder with a `.metadata` of the highest number."""
    if "://" in root:
        volume = open_volume(root)
        found = [name for name in volume.folders() if volume.size(f"{name}/.metadata") is not None]
    else:
        found = [name for name in os.listdir(root) if os.path.exists(os.path.join(root, name, ".metadata"))]
    return max(found, key=lambda name: int(name.removeprefix("step_")))


def train(world: World, root: str, flavour: str) -> list[float]:
    """Saves every step; goes on for two steps after the last save, which a crash is going to lose."""
    job = Job(world, root, seed=1)
    future = None
    while job.step < LAST:
        job.advance()
        writer = VolumeWriter(f"{root}/step_{job.step}")
        if flavour == "save":
            dcp.save(job.state(), storage_writer=writer)
            continue
        if future is not None:
            future.result()
        kind = AsyncCheckpointerType.PROCESS if flavour == "process" else AsyncCheckpointerType.THREAD
        future = dcp.async_save(
            job.state(), storage_writer=writer, process_group=job.group, async_checkpointer_type=kind
        )
    job.advance()  # while the last save is written
    job.advance()
    if future is not None:
        future.result()
    return job.weights()


def resume(world: World, root: str, folder: str) -> list[float]:
    job = Job(world, root, seed=2)
    job.advance()  # so that the optimizer has a state to load into
    job.load(folder)
    assert job.step == LAST
    job.advance()
    job.advance()
    return job.weights()


def check(ranks: int, root: str, flavour: str) -> None:
    expected = in_ranks(ranks, train, root, flavour, timeout=120)
    unfinished = f"step_{LAST + 1000}"
    open_volume(root).put(f"{unfinished}/__0_0.distcp", b"a save that was killed")
    assert newest(root) == f"step_{LAST}"
    assert in_ranks(ranks, resume, root, newest(root), timeout=120) == expected


@pytest.fixture(autouse=True)
def _quiet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")  # for the processes of async_save
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch")


_FLAVOURS = [(flavour, ranks) for flavour in ("save", "thread", "process") for ranks in (1, 2)]


def _usual(*usual: tuple[str, int]) -> list[Any]:
    """All ways to save; those that are not the usual ones of a place only in the long tests."""
    return [pytest.param(*one, marks=() if one in usual else pytest.mark.soak) for one in _FLAVOURS]


@pytest.mark.parametrize(("flavour", "ranks"), _usual(("save", 1), ("thread", 2), ("process", 1)))
def test_training_resumes_from_the_newest_number_on_a_path(tmp_path: Path, flavour: str, ranks: int) -> None:
    check(ranks, str(tmp_path / "run"), flavour)


@pytest.mark.parametrize(("flavour", "ranks"), _usual(("save", 2), ("thread", 1)))
def test_training_resumes_from_the_newest_number_in_a_store(s3: S3, flavour: str, ranks: int) -> None:
    check(ranks, s3.url, flavour)


def test_a_failed_save_is_raised_by_the_future(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")

    def body(world: World) -> str:
        future = dcp.async_save({"w": torch.ones(3)}, storage_writer=VolumeWriter(tmp_path / "file" / "step_1"))
        return str(future.exception(60))

    for text in in_ranks(2, body):
        assert str(tmp_path / "file") in text and "Nothing was published" in text
