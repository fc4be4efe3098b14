"""What one rank sends of a state that all ranks hold: with N ranks an Nth, through its own way to the store."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_support import in_ranks, make_writer
from dcp_states import save as dcp_save
from remote_support import make_tier
from support.s3proxy import S3Proxy
from support.storage import S3

from framework.checkpoint import CheckpointStore, SaveHeader, TrainState, VolumeWriter
from framework.distributed import Group, World

BYTES_PER_SECOND = 30e6  # of each rank's way
ENVELOPE = 60_000  # what is sent beside the tensors: records, manifests, frames, a claim


SIZE = 5_600_000


def layers(count: int) -> dict[str, torch.Tensor]:
    """`float32` `[100, 500]` each, the same on each rank."""
    return {f"layer{number}": torch.full((100, 500), float(number)) for number in range(count)}


def save_as_a_run(world: World, place: str, folder: Path) -> None:
    group = Group(world, timeout_seconds=30, name="checkpoint")
    store = CheckpointStore(folder / "checkpoints")
    writer = make_writer(store, world=world, group=group, remote=make_tier(place, store, group=group))
    table = torch.arange(900_000.0).view(3000, 300)  # more than half of all: it has to be cut
    writer.start(TrainState({"model": {**layers(10), "table": table}}), SaveHeader(1))
    (result,) = writer.wait(60)
    writer.close()
    assert result.committed and result.tier == "both", result.error


def save_with_dcp(world: World, place: str, folder: Path) -> None:
    dcp_save({"model": layers(28)}, VolumeWriter(place))  # torch deals out whole tensors


def body(world: World, save: Any, ways: list[str], place: str, folder: Path) -> None:
    os.environ["AWS_ENDPOINT_URL"] = ways[world.rank]
    save(world, place, folder)


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("save", [save_as_a_run, save_with_dcp])
def test_each_rank_sends_its_part_of_a_replicated_state(tmp_path: Path, s3: S3, save: Any, ranks: int) -> None:
    with contextlib.ExitStack() as stack:
        proxies = [S3Proxy(s3.server.port) for _ in range(ranks)]
        for proxy in proxies:
            stack.callback(proxy.close)
            proxy.limit(BYTES_PER_SECOND)
        in_ranks(ranks, body, save, [proxy.url for proxy in proxies], s3.url, tmp_path)
        sent = [proxy.brought for proxy in proxies]
    assert SIZE <= sum(sent) <= SIZE + ENVELOPE
    assert all(0.97 * SIZE / ranks <= one <= 1.03 * SIZE / ranks + ENVELOPE for one in sent)
