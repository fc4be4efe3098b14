"""`diff`, `copy` and `export`: what leaves a run is the same bits, whole or not at all."""

from __future__ import annotations

import json
import os
import shutil
import signal
import struct
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from checkpoint_support import assert_holds, in_ranks, make_writer, save, small_state, snapshot
from safetensors.torch import load_file
from support.storage import S3
from torch import nn

from framework.checkpoint import CheckpointStore, SaveHeader, TrainState, VolumeWriter
from framework.checkpoint.__main__ import main
from framework.checkpoint.commands import consolidated
from framework.checkpoint.manifest import METADATA
from framework.distributed import Group, World

Told = Callable[..., Any]


def write(store: CheckpointStore, tensors: Any, step: int = 1, *, shared: Any = None, rank: Any = None) -> Path:
    writer = make_writer(store)
    writer.start(TrainState(tensors, shared or {}, rank or {}), SaveHeader(step))
    (result,) = writer.wait(30)
    writer.close()
    assert result.committed, result.error
    return result.path


def stock(folder: Path, state: Any) -> Path:
    with warnings.catch_warnings(action="ignore"):
        dcp.save(state, checkpoint_id=str(folder), no_dist=True)
    return folder


@pytest.fixture
def other(tmp_path: Path) -> CheckpointStore:
    return CheckpointStore(tmp_path / "other" / "checkpoints")


# -- diff ----------------------------------------------------------------------------------------------------------------


def test_equal_checkpoints_are_equal_with_nan_and_other_clocks(
    store: CheckpointStore, other: CheckpointStore, told: Told
) -> None:
    tensors = {"model": {"w": torch.tensor([1.0, float("nan"), -0.0]), "n": torch.tensor(3), "e": torch.zeros(0, 2)}}
    write(store, tensors, shared={"x": float("nan"), "elapsed_seconds": 1.0, "config": {"a": 1}})
    write(other, tensors, shared={"x": float("nan"), "elapsed_seconds": 2.0, "config": {"a": 2}})
    found = told("diff", store.path.parent, other.path.parent)
    assert found["equal"] and found["tensors"] == {"equal": 3, "different": 0, "only_in_a": 0, "only_in_b": 0}
    assert told("diff", f"{store.path.parent}@1", other.folder(1))["equal"]


def test_the_first_differing_element_is_told_with_both_values(
    store: CheckpointStore, other: CheckpointStore, told: Told, capsys: pytest.CaptureFixture[str]
) -> None:
    model = {"a": torch.zeros(2), "w": torch.arange(12.0).reshape(3, 4), "z": torch.tensor([0.0]), "s": torch.ones(2)}
    theirs = {**model, "w": model["w"].clone(), "z": torch.tensor([-0.0]), "s": torch.ones(3), "more": torch.ones(1)}
    theirs["w"][1, 2] = 6.5
    theirs["w"][2, 0] = 9.0
    write(store, {"model": model, "gone": torch.ones(1)})
    write(other, {"model": theirs})
    found = told("diff", store.path.parent, other.path.parent, code=1)
    by_key = {one["key"]: one for one in found["differences"]}
    assert by_key.keys() == {"model.w", "model.z", "model.s"}
    w = by_key["model.w"]
    assert (w["index"], w["a"], w["b"], w["count"], w["of"]) == ([1, 2], "6.0", "6.5", 2, 12)
    assert w["a_bits"] == "0x" + struct.pack(">f", 6.0).hex()
    assert (by_key["model.z"]["a"], by_key["model.z"]["b"]) == ("0.0", "-0.0")
    assert (by_key["model.s"]["a"], by_key["model.s"]["b"]) == ("float32 [2]", "float32 [3]")
    assert found["only_in_a"] == ["gone"] and found["only_in_b"] == ["model.more"]
    assert found["tensors"] == {"equal": 1, "different": 3, "only_in_a": 1, "only_in_b": 1}
    assert main(["diff", str(store.path.parent), str(other.path.parent)]) == 1
    assert "[1, 2] is 6.0 in A and 6.5 in B" in capsys.readouterr().out


def test_python_values_that_differ_are_told_by_path(store: CheckpointStore, other: CheckpointStore, told: Told) -> None:
    tensors = {"model": {"w": torch.ones(2)}}
    write(store, tensors, shared={"a": {"b": [1, 2.0, torch.ones(2)], "c": 0}}, rank={"rng": torch.arange(3)})
    write(other, tensors, shared={"a": {"b": [1, 2, torch.zeros(2)], "d": 0}}, rank={"rng": torch.arange(1, 4)})
    found = told("diff", store.path.parent, other.path.parent, code=1)
    assert [one["path"] for one in found["values"]] == [
        "shared.a.b[1]", "shared.a.b[2]", "shared.a.c", "shared.a.d", "rank 0.rng",
    ]  # fmt: skip
    assert (found["values"][0]["a"], found["values"][0]["b"]) == ("2.0", "2")
    assert told("diff", store.path.parent, other.path.parent, "--tensors")["equal"]


def save_as(world: World, path: Path) -> None:
    writer = make_writer(CheckpointStore(path), world=world, group=Group(world, timeout_seconds=20, name="checkpoint"))
    writer.start(small_state(1), SaveHeader(1))
    (result,) = writer.wait(30)
    writer.close()
    assert result.committed, result.error


def test_other_shards_and_other_writers_make_no_difference(
    store: CheckpointStore, other: CheckpointStore, tmp_path: Path, told: Told
) -> None:
    save(store, 1)
    in_ranks(2, save_as, other.path)
    found = told("diff", store.path.parent, other.path.parent)
    assert found["equal"] and any("A has 1 ranks, B has 2" in text for text in found["notes"])
    theirs = stock(tmp_path / "stock", dict(small_state(1).tensors))
    assert told("diff", theirs, store.folder(1))["tensors"]["equal"] == found["tensors"]["equal"]
    with warnings.catch_warnings(action="ignore"):
        dcp.save(dict(small_state(1).tensors), storage_writer=VolumeWriter(tmp_path / "plain"), no_dist=True)
    assert told("diff", tmp_path / "plain", theirs)["equal"]


def test_damage_is_never_taken_for_a_difference(
    store: CheckpointStore, other: CheckpointStore, capsys: pytest.CaptureFixture[str]
) -> None:
    for one in (store, other):
        save(one, 1)
    flip(other, 1)
    assert main(["diff", str(store.path.parent), str(other.path.parent)]) == 2
    told = capsys.readouterr().err
    assert str(other.folder(1)) in told and "checksum differs" in told
    assert main(["diff", str(store.path.parent), str(store.path)]) == 0
    assert main(["diff", str(store.path.parent), str(store.path / "nothing")]) == 2


def flip(store: CheckpointStore, step: int) -> Path:
    (path,) = store.folder(step).glob("__0_0.*")
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    return path


# -- copy ----------------------------------------------------------------------------------------------------------------


def test_a_copy_is_the_same_files_and_can_be_resumed_from(
    store: CheckpointStore, other: CheckpointStore, told: Told, tmp_path: Path
) -> None:
    for step in (1, 2):
        save(store, step)
    target = tmp_path / "copy"
    found = told("copy", store.path.parent, target)
    assert snapshot(target) == snapshot(store.folder(2))
    assert found["copied_bytes"] == found["bytes"] == sum(path.stat().st_size for path in target.iterdir())
    assert told("copy", store.path.parent, target)["copied_bytes"] == 0
    (other.path.parent / "events").mkdir(parents=True)
    told("copy", store.path.parent, other.folder(1), "--step", "1")
    assert_holds(other, 1)
    assert not (store.path / "marks").exists()


def test_a_copy_goes_on_where_it_was_interrupted_and_repairs(
    store: CheckpointStore, tmp_path: Path, told: Told
) -> None:
    save(store, 1)
    target = tmp_path / "copy"
    told("copy", store.path.parent, target)
    (target / METADATA).unlink()
    (shard,) = target.glob("__0_0.*")
    data = bytearray(shard.read_bytes())
    data[10] ^= 1
    shard.write_bytes(data)
    found = told("copy", store.path.parent, target)
    assert snapshot(target) == snapshot(store.folder(1))
    assert found["copied_bytes"] == len(data) + (target / METADATA).stat().st_size


def test_nothing_is_published_of_a_damaged_checkpoint_and_nothing_else_is_overwritten(
    store: CheckpointStore, tmp_path: Path, capsys: pytest.CaptureFixture[str], told: Told
) -> None:
    for step in (1, 2, 3):
        save(store, step)
    flip(store, 3)
    target = tmp_path / "copy"
    assert main(["copy", str(store.path.parent), str(target)]) == 1
    assert "checksum differs" in capsys.readouterr().err and not (target / METADATA).exists()
    assert main(["copy", f"{store.path.parent}@2", str(tmp_path / "two")]) == 0
    before = snapshot(tmp_path / "two")
    assert main(["copy", f"{store.path.parent}@1", str(tmp_path / "two")]) == 1
    assert "holds another checkpoint" in capsys.readouterr().err and snapshot(tmp_path / "two") == before
    (tmp_path / "full").mkdir()
    (tmp_path / "full/notes.txt").write_text("mine")
    assert main(["copy", f"{store.path.parent}@1", str(tmp_path / "full")]) == 1
    assert "notes.txt" in capsys.readouterr().err and os.listdir(tmp_path / "full") == ["notes.txt"]
    for wrong in (store.path.parent, store.path, store.folder(9)):
        assert main(["copy", f"{store.path.parent}@1", str(wrong)]) == 1


def test_a_copy_to_a_store_and_back_is_the_same(store: CheckpointStore, tmp_path: Path, s3: S3, told: Told) -> None:
    save(store, 1)
    s3.proxy.fail(503, count=2)
    told("copy", store.path.parent, f"{s3.url}/kept/step_0000000001")
    assert [path for method, path in s3.proxy.log if method in ("PUT", "POST")][-1].split("?")[0].endswith(METADATA)
    told("copy", f"{s3.url}/kept@1", tmp_path / "back")
    assert snapshot(tmp_path / "back") == snapshot(store.folder(1))
    assert told("show", f"{s3.url}/kept")["header"]["step"] == 1
    assert told("verify", f"{s3.url}/kept", "--full")[0]["damage"] is None
    assert [row["tier"] for row in told("ls", f"{s3.url}/kept")] == ["remote"]


@pytest.mark.cold
def test_a_copy_that_is_killed_publishes_nothing_and_is_finished_by_the_next(
    store: CheckpointStore, tmp_path: Path, told: Told
) -> None:
    write(store, {"model": {"w": torch.arange(20_000_000, dtype=torch.float32)}})
    target = tmp_path / "copy"
    command = [sys.executable, "-m", "framework.checkpoint", "copy", str(store.path.parent), str(target)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        deadline = time.monotonic() + 120
        while not target.is_dir() and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.001)
        process.send_signal(signal.SIGKILL)
    if (target / METADATA).exists():  # it was done before
        assert snapshot(target) == snapshot(store.folder(1))
    told("copy", store.path.parent, target)
    found = {name: one for name, one in snapshot(target).items() if not name.startswith(".volume-")}
    assert found == snapshot(store.folder(1))


def test_a_stock_checkpoint_is_copied_too(tmp_path: Path, told: Told) -> None:
    source = stock(tmp_path / "stock", {"model": {"w": torch.ones(3)}, "lr": 0.1})
    told("copy", source, tmp_path / "copy")
    assert snapshot(tmp_path / "copy") == snapshot(source)


# -- export --------------------------------------------------------------------------------------------------------------


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(7, 4)
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.emb.weight


def trained() -> Tied:
    torch.manual_seed(3)
    model = Tied()
    model.norm.running_mean.normal_()
    return model


def same(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> bool:
    return ours.keys() == theirs.keys() and all(torch.equal(ours[key], theirs[key]) for key in ours)


@pytest.fixture
def model_run(store: CheckpointStore) -> Path:
    model = trained()
    averages = {name: value.detach() + 1 for name, value in model.named_parameters()}
    write(store, {"model": model.state_dict(), "optimizer": {"m": torch.ones(3)}, "ema": averages})
    return store.path.parent


@pytest.mark.parametrize("name", ["w.safetensors", "w.pt"])
def test_exported_weights_load_strictly(model_run: Path, tmp_path: Path, told: Told, name: str) -> None:
    target = tmp_path / name
    told("export", model_run, "--step", "1", "--to", target)
    found = load_file(target) if target.suffix == ".safetensors" else torch.load(target, weights_only=True)
    assert same(found, trained().state_dict())
    fresh = Tied()
    fresh.load_state_dict(found, strict=True)
    assert sorted(os.listdir(tmp_path)) == sorted([name, "run"])
    if name == "w.pt":
        assert found["emb.weight"].data_ptr() == found["head.weight"].data_ptr()


@pytest.mark.parametrize("name", ["e.safetensors", "e.pt"])
def test_exported_averages_are_a_whole_model_with_tied_weights(
    model_run: Path, tmp_path: Path, told: Told, name: str
) -> None:
    target = tmp_path / name
    told("export", model_run, "--to", target, "--part", "ema")
    found = load_file(target) if target.suffix == ".safetensors" else torch.load(target, weights_only=True)
    live = trained().state_dict()
    assert found.keys() == live.keys()
    for key in ("emb.weight", "head.weight", "norm.weight", "norm.bias"):
        assert torch.equal(found[key], live[key] + 1), key
    assert torch.equal(found["norm.running_mean"], live["norm.running_mean"])


def test_long_exports_are_several_files_with_an_index(
    model_run: Path, tmp_path: Path, told: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(consolidated, "SHARD_BYTES", 120)
    target = tmp_path / "w.safetensors"
    found = told("export", model_run, "--to", target)
    index = json.loads((tmp_path / "w.safetensors.index.json").read_text())
    assert not target.exists() and len(found["files"]) == len(set(index["weight_map"].values())) + 1 > 3
    tensors: dict[str, torch.Tensor] = {}
    for file in set(index["weight_map"].values()):
        part = load_file(tmp_path / file)
        assert {key for key, where in index["weight_map"].items() if where == file} == part.keys()
        tensors |= part
    assert same(tensors, trained().state_dict())
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in tensors.values())
    assert main(["export", str(model_run), "--to", str(target)]) == 1  # the index is there
    monkeypatch.undo()
    told("export", model_run, "--to", target, "--force")
    assert target.exists() and not (tmp_path / "w.safetensors.index.json").exists()


def test_an_export_is_whole_or_not_there(
    model_run: Path, tmp_path: Path, store: CheckpointStore, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "w.pt"
    target.write_text("mine")
    assert main(["export", str(model_run), "--to", str(target)]) == 1
    assert "--force" in capsys.readouterr().err and target.read_text() == "mine"
    shutil.copytree(store.folder(1), store.folder(2))
    (shard,) = store.folder(1).glob("__0_0.*")
    data = shard.read_bytes()
    weight = trained().emb.weight.detach().numpy().tobytes()
    at = data.index(weight)
    shard.write_bytes(data[: at + 5] + bytes([data[at + 5] ^ 1]) + data[at + 6 :])
    for name in ("w.pt", "w.safetensors"):
        assert main(["export", f"{model_run}@1", "--to", str(tmp_path / name), "--force"]) == 1
        assert "checksum differs" in capsys.readouterr().err
    assert target.read_text() == "mine" and sorted(os.listdir(tmp_path)) == ["run", "w.pt"]
    for wrong in ("w.zip", "no/folder/w.pt"):
        assert main(["export", f"{model_run}@1", "--to", str(tmp_path / wrong)]) == 1
        assert wrong.rpartition("/")[2] in capsys.readouterr().err


def test_what_safetensors_cannot_hold_is_said_and_nothing_is_left(
    store: CheckpointStore, tmp_path: Path, capsys: pytest.CaptureFixture[str], told: Told
) -> None:
    write(store, {"model": {"c": torch.ones(2, dtype=torch.complex128)}})
    run = store.path.parent
    assert main(["export", str(run), "--to", str(tmp_path / "w.safetensors")]) == 1
    assert ".pt file instead" in capsys.readouterr().err and os.listdir(tmp_path) == ["run"]
    told("export", run, "--to", tmp_path / "w.pt")
    assert torch.load(tmp_path / "w.pt", weights_only=True)["c"].dtype == torch.complex128


def test_weights_of_plain_saves_are_exported_by_the_name_of_their_part(
    tmp_path: Path, told: Told, capsys: pytest.CaptureFixture[str]
) -> None:
    weights = {"fc.weight": torch.randn(3, 2), "fc.bias": torch.zeros(3)}
    source = stock(tmp_path / "stock", {"app": {"model": weights}, "lr": 0.1})
    told("export", source, "--to", tmp_path / "w.pt", "--part", "app.model")
    assert same(torch.load(tmp_path / "w.pt", weights_only=True), weights)
    assert main(["export", str(source), "--to", str(tmp_path / "x.pt")]) == 1
    assert "has no part 'model'" in capsys.readouterr().err
