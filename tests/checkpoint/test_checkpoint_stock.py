"""Checkpoints that stock torch wrote are recognised, read without running code, and can begin a run."""

from __future__ import annotations

import os
import pickle
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from checkpoint_support import blank, in_ranks, save, solo_group
from torch import nn
from torch.distributed.checkpoint.format_utils import torch_save_to_dcp

from framework.checkpoint import CheckpointStore, stock
from framework.checkpoint.files import DamagedError
from framework.checkpoint.manifest import METADATA, unseal
from framework.distributed import Group, World
from framework.errors import CheckpointError, StateMismatchError


def network() -> nn.Module:
    generator = torch.Generator().manual_seed(1)
    model = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    for tensor in model.state_dict().values():
        tensor.copy_((torch.rand(tensor.shape, generator=generator) * 100).to(tensor.dtype))
    return model


def weights() -> dict[str, torch.Tensor]:
    return network().state_dict()


def moments() -> dict[str, Any]:
    return {"state": {"0.weight": {"exp_avg": torch.full((4, 6), 0.5)}}, "lr": 0.1, "betas": [0.9, 0.99]}


def write(state: Any, folder: Path) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(state, checkpoint_id=str(folder), no_dist=True)
    return folder


def same(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> bool:
    return ours.keys() == theirs.keys() and all(torch.equal(ours[key], theirs[key]) for key in ours)


def load(folder: Path, model: dict[str, torch.Tensor], **options: Any) -> list[str]:
    return stock.load_model(folder, model, solo_group(), **options)


def test_ours_and_theirs_are_told_apart_even_when_ours_are_damaged(store: CheckpointStore, tmp_path: Path) -> None:
    save(store, 1)
    ours, theirs = store.folder(1), write(weights(), tmp_path / "stock")
    assert stock.is_stock(theirs) and not stock.is_stock(ours) and not stock.is_stock(tmp_path)
    data = (ours / METADATA).read_bytes()
    pickled, seal = unseal(data)
    (ours / METADATA).write_bytes(pickled)
    assert not stock.is_stock(ours)
    (ours / seal.manifest).unlink()
    assert not stock.is_stock(ours)
    with pytest.raises(DamagedError, match="without its seal"):
        stock.record(ours)


def test_tensors_and_python_values_are_read_by_key(tmp_path: Path) -> None:
    folder = write({"model": weights(), "optim": moments(), "step": 7}, tmp_path / "stock")
    everything = stock.load_tensors(folder)
    assert torch.equal(everything["model.0.weight"], weights()["0.weight"])
    assert torch.equal(everything["optim.state.0.weight.exp_avg"], torch.full((4, 6), 0.5))
    assert stock.load_tensors(folder, ["model.2.bias"]).keys() == {"model.2.bias"}
    objects = stock.load_objects(folder)
    assert objects["step"] == 7 and objects["optim.lr"] == 0.1
    with pytest.raises(CheckpointError, match=r"holds no tensor under 'model\.9'"):
        stock.load_tensors(folder, ["model.9"])
    with pytest.raises(CheckpointError, match=r"holds no Python value under 'model\.0\.weight'"):
        stock.load_objects(folder, ["model.0.weight"])


@pytest.mark.parametrize(
    ("state", "left"),
    [
        (lambda model: {"model": model, "optim": moments()}, "optim.lr"),
        (lambda model: {"state_dict": model, "epoch": 3}, "epoch"),
        (lambda model: {"app": {"model": model, "optim": moments()}}, "app.optim.lr"),
        (lambda model: {**model, "optim": moments()}, "optim.lr"),
        (lambda model: {"model": {f"module.{key}": value for key, value in model.items()}}, None),
    ],
    ids=["model", "state_dict", "app", "top", "ddp"],
)
def test_the_weights_are_found_where_published_loops_put_them(tmp_path: Path, state: Any, left: str | None) -> None:
    folder = write(state(weights()), tmp_path / "stock")
    model = blank(weights())
    others = load(folder, model, rename=lambda key: key.removeprefix("module."))
    assert same(model, weights())
    assert left in others if left else not others


def test_what_does_not_fit_is_listed_and_nothing_is_loaded(tmp_path: Path) -> None:
    stored = weights()
    del stored["2.bias"]
    stored["extra.weight"] = torch.ones(2)
    stored["0.bias"] = stored["0.bias"].double()
    folder = write({"model": stored, "optim": moments()}, tmp_path / "stock")
    model = blank(weights())
    with pytest.raises(StateMismatchError) as raised:
        load(folder, model)
    for part in (
        "missing in the checkpoint: 2.bias [2] float32",
        "only in the checkpoint: extra.weight [2] float32",
        "0.bias is [4] float64 in the checkpoint and [4] float32 here",
    ):
        assert part in str(raised.value)
    assert "optim" not in str(raised.value)
    assert not any(tensor.any() for tensor in model.values())


def test_at_the_top_a_key_of_one_of_the_models_parts_is_not_left_alone(tmp_path: Path) -> None:
    folder = write({**weights(), "2.extra": torch.ones(3), "other": torch.ones(1)}, tmp_path / "stock")
    with pytest.raises(StateMismatchError, match=r"only in the checkpoint: 2\.extra \[3\] float32"):
        load(folder, blank(weights()))


def test_a_torch_save_file_made_into_a_checkpoint_is_read(tmp_path: Path) -> None:
    torch.save({"model": weights(), "step": 3}, tmp_path / "plain.pt")
    torch_save_to_dcp(str(tmp_path / "plain.pt"), str(tmp_path / "stock"))
    load(tmp_path / "stock", model := blank(weights()))
    assert same(model, weights())
    assert stock.load_objects(tmp_path / "stock", ["step"]) == {"step": 3}


def damage(folder: Path, kind: str) -> None:
    shard = folder / "__0_0.distcp"
    if kind == "cut":
        os.truncate(shard, shard.stat().st_size // 2)
    elif kind == "gone":
        shard.unlink()
    elif kind == "link":
        os.rename(shard, folder.parent / "elsewhere")
        shard.symlink_to(folder.parent / "elsewhere")
    elif kind == "metadata":
        os.truncate(folder / METADATA, (folder / METADATA).stat().st_size // 2)
    elif kind == "payload":
        shard.write_bytes(bytes(shard.stat().st_size))


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("cut", "__0_0.distcp"),
        ("gone", "__0_0.distcp is missing"),
        ("link", "not a regular file"),
        ("metadata", "cannot be read"),
        ("payload", "holds no tensor"),
    ],
)
def test_damage_that_shows_is_an_error(tmp_path: Path, kind: str, message: str) -> None:
    folder = write({"model": weights()}, tmp_path / "stock")
    damage(folder, kind)
    with pytest.raises(CheckpointError, match=message):
        load(folder, blank(weights()))


class Attack:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return (os.mkdir, (str(self.marker),))


def test_no_code_of_a_stock_checkpoint_runs(tmp_path: Path) -> None:
    marker = tmp_path / "code-ran"
    folder = write({"model": weights(), "evil": Attack(marker)}, tmp_path / "stock")
    with pytest.raises(CheckpointError, match=r"'evil' is not loaded without running code.*posix\.mkdir"):
        stock.load_objects(folder)
    load(folder, model := blank(weights()))
    assert same(model, weights())
    (folder / METADATA).write_bytes(pickle.dumps(Attack(marker)))
    with pytest.raises(CheckpointError, match=r"asks for posix\.mkdir"):
        load(folder, blank(weights()))
    assert not marker.exists()


def test_a_record_cannot_lead_out_of_its_folder(tmp_path: Path) -> None:
    folder = write({"model": weights()}, tmp_path / "stock")
    found = stock.record(folder)
    found.storage_meta = None
    shutil.copyfile(folder / "__0_0.distcp", tmp_path / "__0_0.distcp")
    for name in ("../__0_0.distcp", str(tmp_path / "__0_0.distcp"), "..", ""):
        for place in found.storage_data.values():
            place.relative_path = name
        (folder / METADATA).write_bytes(pickle.dumps(found))
        with pytest.raises(DamagedError, match="outside of the folder"):
            stock.load_tensors(folder)


def test_a_record_with_a_hole_is_refused(tmp_path: Path) -> None:
    folder = write({"w": torch.ones(4, 4)}, tmp_path / "stock")
    found = stock.record(folder)
    found.storage_meta = None
    entry = found.state_dict_metadata["w"]
    entry.size = torch.Size([5, 4])  # type: ignore[union-attr]
    (folder / METADATA).write_bytes(pickle.dumps(found))
    with pytest.raises(DamagedError, match="16 of the 20 elements of 'w'"):
        stock.record(folder)


def loading(world: World, folder: Path, is_broken_on_1: bool) -> str:
    group = Group(world, timeout_seconds=20, name="checkpoint")
    model = blank(weights())
    if is_broken_on_1 and world.rank == 1:
        model["0.weight"] = torch.zeros(3)
    try:
        stock.load_model(folder, model, group)
    except StateMismatchError as error:
        assert not any(tensor.any() for tensor in model.values())
        return str(error)
    return "loaded" if same(model, weights()) else "wrong"


def test_all_ranks_load_or_none(tmp_path: Path) -> None:
    folder = write({"model": weights()}, tmp_path / "stock")
    assert in_ranks(2, loading, folder, False) == ["loaded", "loaded"]
    first, second = in_ranks(2, loading, folder, True)
    assert first == second and first.startswith("rank 1: ") and "0.weight is [4, 6]" in first
