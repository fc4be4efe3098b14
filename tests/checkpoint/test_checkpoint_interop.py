"""Ours is read by stock torch and stock is read by us, bit for bit, over any number of ranks and any sharding."""

from __future__ import annotations

import io
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from checkpoint_support import blank, in_ranks, leaves, make_reader, make_writer, solo_group
from torch import nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import get_state_dict

from framework.checkpoint import CheckpointReader, CheckpointStore, SaveHeader, TrainState, stock
from framework.distributed import Group, World


@contextmanager
def quiet() -> Iterator[None]:
    """Stock torch warns of what it does itself."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def trained(is_sharded: bool) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model of odd sizes after one step of Adam, the same on all ranks; over all of them if it is sharded."""
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(7, 5), nn.BatchNorm1d(5), nn.Linear(5, 3))
    if is_sharded:
        for layer in (model[0], model[2], model):
            fully_shard(layer)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    inputs = torch.randn(6, 7, generator=torch.Generator().manual_seed(4))
    model(inputs).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def tensors_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Everything that is a tensor, nested as stock torch nests it."""
    weights, state = get_state_dict(model, optimizer)
    return {"model": weights, "optim": {"state": state["state"]}}


def whole(tensors: Any) -> list[torch.Tensor]:
    """Full tensors of all leaves. A collective if they are sharded."""
    return [t.full_tensor() if hasattr(t, "full_tensor") else t.clone() for t in leaves(tensors)]


def zeroed(tensors: Any) -> Any:
    for tensor in leaves(tensors):
        tensor.zero_()
    return tensors


def equal(ours: Any, theirs: list[torch.Tensor]) -> bool:
    found = whole(ours)
    return len(found) == len(theirs) and all(torch.equal(a, b) for a, b in zip(found, theirs, strict=True))


def writing(world: World, ours: Path, theirs: Path, is_sharded: bool) -> bytes:
    """One state, saved by us and by stock torch; returns it whole, as `torch.save` does."""
    with quiet():
        tensors = tensors_of(*trained(is_sharded))
        group = Group(world, timeout_seconds=30, name="checkpoint")
        writer = make_writer(CheckpointStore(ours), world=world, group=group)
        writer.start(TrainState(tensors), SaveHeader(1))
        (result,) = writer.wait(60)
        writer.close()
        assert result.committed, result.error
        dcp.save(tensors, checkpoint_id=str(theirs))
        torch.save([tensor.detach() for tensor in whole(tensors)], buffer := io.BytesIO())
        return buffer.getvalue()


def reading(world: World, ours: Path, theirs: Path, is_sharded: bool, state: bytes) -> list[bool]:
    """Ours by stock torch, stock by us, and ours by us, into this world and this sharding."""
    expected = loaded(state)
    with quiet():
        group = Group(world, timeout_seconds=30, name="checkpoint")
        tensors = zeroed(tensors_of(*trained(is_sharded)))
        answers = [not equal(tensors, expected)]
        dcp.load(tensors, checkpoint_id=str(CheckpointStore(ours).folder(1)))
        answers.append(equal(tensors, expected))
        stock.load_model(theirs, zeroed(tensors)["model"], group)
        answers.append(equal(tensors["model"], expected[: len(leaves(tensors["model"]))]))
        reader = CheckpointReader(CheckpointStore(ours), world, group)
        found = reader.newest_valid()
        assert found is not None
        reader.load(found, zeroed(tensors))
        return [*answers, equal(tensors, expected)]


def loaded(state: bytes) -> list[torch.Tensor]:
    tensors: list[torch.Tensor] = torch.load(io.BytesIO(state), weights_only=True)
    return tensors


def in_world(size: int, *arguments: Any) -> Any:
    first, *others = in_ranks(size, *arguments, timeout=120)
    assert all(other == first for other in others)
    return first


def test_any_world_and_sharding_is_read_by_the_other_side(tmp_path: Path) -> None:
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    for number, (size, is_sharded, targets) in enumerate(
        [(2, True, [(1, False), (3, True)]), (2, False, [(1, False)]), (1, False, [(2, True)])]
    ):
        places = (ours / str(number), theirs / str(number))
        state = in_world(size, writing, *places, is_sharded)
        for world, is_target_sharded in targets:
            assert in_world(world, reading, *places, is_target_sharded, state) == [True] * 4
        flat = stock.load_tensors(places[1])
        assert all(any(torch.equal(tensor, one) for one in flat.values()) for tensor in loaded(state))


def test_a_sharded_one_of_ours_becomes_a_torch_save_file(tmp_path: Path) -> None:
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    state = in_world(2, writing, ours, theirs, True)
    with quiet():
        dcp_to_torch_save(str(CheckpointStore(ours).folder(1)), str(tmp_path / "ours.pt"))
        dcp_to_torch_save(str(theirs), str(tmp_path / "theirs.pt"))
    left, right = (torch.load(tmp_path / name, weights_only=True) for name in ("ours.pt", "theirs.pt"))
    assert left["model"].keys() == right["model"].keys()
    for key, tensor in left["model"].items():
        assert torch.equal(tensor, right["model"][key])
    assert any(torch.equal(tensor, loaded(state)[0]) for tensor in left["model"].values())


def test_the_moments_and_weights_of_one_process_go_both_ways(tmp_path: Path) -> None:
    model, optimizer = trained(False)
    with quiet():
        tensors = tensors_of(model, optimizer)
        expected = whole(tensors)
        dcp.save(tensors, checkpoint_id=str(tmp_path / "theirs"), no_dist=True)
    flat = stock.load_tensors(tmp_path / "theirs")
    assert torch.equal(flat["optim.state.0.weight.exp_avg"], tensors["optim"]["state"]["0.weight"]["exp_avg"])
    store = CheckpointStore(tmp_path / "ours")
    writer = make_writer(store)
    writer.start(TrainState(tensors), SaveHeader(1))
    assert writer.wait(30)[0].committed
    writer.close()
    live = blank(tensors)
    with quiet():
        dcp.load(live, checkpoint_id=str(store.folder(1)), no_dist=True)
    assert equal(live, expected)
    reader = make_reader(store)
    found = reader.newest_valid()
    assert found is not None
    reader.load(found, live := blank(tensors))
    assert equal(live, expected)
    stock.load_model(tmp_path / "theirs", weights := blank(tensors["model"]), solo_group())
    assert all(torch.equal(weights[key], tensor) for key, tensor in tensors["model"].items())
    assert not dist.is_initialized()
