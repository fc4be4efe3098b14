"""`VolumeWriter` and `VolumeReader` on several real ranks: all hear of an error, and no rank's values are lost."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from checkpoint_support import in_ranks, snapshot
from dcp_states import REFUSED, assert_same, load, save, state, tensors
from support.faultfs import FaultFS
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from framework.checkpoint import VolumeReader, VolumeWriter, per_rank
from framework.distributed import World


def refusal(action: Callable[[], Any]) -> str:
    """What an action that must fail says."""
    try:
        action()
    except REFUSED as error:
        return str(error)
    raise AssertionError("it was not refused")


def test_replicas_are_written_once_and_each_rank_keeps_its_own(tmp_path: Path) -> None:
    def body(world: World) -> None:
        mine = {**state(7), "own": {"rng": per_rank(torch.arange(3) + world.rank), "word": per_rank(f"r{world.rank}")}}
        save(mine, VolumeWriter(tmp_path))
        blank = {**state(1), "own": {"rng": per_rank(torch.zeros(3, dtype=torch.int64)), "word": per_rank("")}}
        loaded = load(blank, VolumeReader(tmp_path))
        assert_same(loaded["own"]["rng"].value, torch.arange(3) + world.rank)
        assert loaded["own"]["word"].value == f"r{world.rank}"
        loaded.pop("own")
        assert_same(loaded, state(7))

    in_ranks(2, body)
    save(state(7), VolumeWriter(tmp_path / "alone"))
    sizes = [sum(path.stat().st_size for path in tmp_path.glob(shards)) for shards in ("__0*", "__1*", "alone/__*")]
    assert min(sizes) > 10_000 and abs(sizes[0] + sizes[1] - sizes[2]) < 60_000  # one copy in all, and one tied tensor
    loaded = load(tensors(1), dcp.FileSystemReader(tmp_path))
    assert_same(loaded, tensors(7))


def test_fewer_ranks_read_their_own_values_and_further_ranks_are_told_that_they_have_none(tmp_path: Path) -> None:
    def write(world: World) -> None:
        save({"rng": per_rank({"a": world.rank, "b": torch.tensor(world.rank)})}, VolumeWriter(tmp_path))

    def read(world: World) -> str:
        mine = {"rng": per_rank({"a": -1, "b": torch.tensor(-1)})}
        planner = dcp.DefaultLoadPlanner(allow_partial_load=world.size == 4)
        return refusal(lambda: load(mine, VolumeReader(tmp_path), planner=planner))

    in_ranks(2, write)
    alone = load({"rng": per_rank({"a": -1, "b": torch.tensor(-1)})}, VolumeReader(tmp_path))
    assert alone["rng"].value == {"a": 0, "b": torch.tensor(0)}
    for size in (3, 4):
        for text in in_ranks(size, read):
            assert "has 'rng' of 2 ranks, each its own, and none of rank 2" in text


def test_different_values_under_one_key_are_refused_on_all_ranks(tmp_path: Path) -> None:
    def body(world: World) -> list[str]:
        values = {
            "position": {"rank": world.rank},
            "weight": torch.tensor([0.0, 1.0 + world.rank]),
            "seed": torch.zeros(2 + world.rank),
        }

        def attempt(key: str) -> str:
            return refusal(lambda: save({**state(7), key: values[key]}, VolumeWriter(tmp_path / key)))

        return [attempt(key) for key in values]

    for texts in in_ranks(2, body):
        assert "'position.rank' (rank 0 and rank 1)" in texts[0]
        assert "'weight' (rank 0 and rank 1)" in texts[1]
        assert "'seed' (rank 0 and rank 1)" in texts[2]
        assert all("per_rank()" in text and "nothing was published" in text for text in texts)
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_equal_values_are_not_taken_for_different_ones(tmp_path: Path) -> None:
    def body(world: World) -> None:
        text = "".join(["one ", "text"])
        pairs = [text, text] if world.rank else ["one text", "".join(["one ", "text"])]
        mine = {"pairs": pairs, "table": dict(sorted({"x": 1, "y": float("nan")}.items(), reverse=bool(world.rank)))}
        save(
            {
                "v": (mine,),
                "strided": torch.arange(6).view(2, 3).t() if world.rank else torch.tensor([[0, 3], [1, 4], [2, 5]]),
            },
            VolumeWriter(tmp_path),
        )

    in_ranks(2, body)
    assert (tmp_path / ".metadata").exists()


def test_the_check_holds_with_a_planner_that_remembers_its_plan(tmp_path: Path) -> None:
    def body(world: World) -> str:
        planner = dcp.DefaultSavePlanner(enable_plan_caching=True)
        for step in (2, 3, 4):
            save(state(step), VolumeWriter(tmp_path / str(step)), planner=planner)
            assert_same(load(state(1), VolumeReader(tmp_path / str(step))), state(step))
        mine = {**state(5), "step": world.rank}
        return refusal(lambda: save(mine, VolumeWriter(tmp_path / "5"), planner=planner))

    assert all("'step' (rank 0 and rank 1)" in text for text in in_ranks(2, body))


def test_shards_of_two_ranks_are_loaded_by_one_and_three(tmp_path: Path) -> None:
    whole = torch.arange(33 * 5, dtype=torch.float32).view(33, 5)

    def sharded(world: World, value: torch.Tensor) -> Any:
        return distribute_tensor(value, init_device_mesh("cpu", (world.size,)), [Shard(0)])

    def write(world: World) -> None:
        save({"w": sharded(world, whole), "plain": whole * 2}, VolumeWriter(tmp_path, file_bytes=200))

    def read(world: World) -> None:
        mine = {"w": sharded(world, torch.zeros(33, 5)), "plain": sharded(world, torch.zeros(33, 5))}
        load(mine, VolumeReader(tmp_path))
        assert_same(mine["w"].full_tensor(), whole)
        assert_same(mine["plain"].full_tensor(), whole * 2)

    in_ranks(2, write)
    in_ranks(3, read)
    assert_same(load({"w": torch.zeros(33, 5)}, VolumeReader(tmp_path))["w"], whole)
    assert_same(load({"w": torch.zeros(33, 5)}, dcp.FileSystemReader(tmp_path))["w"], whole)


def test_a_failing_disk_on_one_rank_is_raised_on_all_and_nothing_is_published(faultfs: FaultFS) -> None:
    target = faultfs.path / "latest"

    def body(world: World) -> str:
        return refusal(lambda: save(state(8), VolumeWriter(target)))

    save(state(7), VolumeWriter(target))
    before = snapshot(target)
    faultfs.full(after=50_000)
    assert all("No space left" in text and str(target) in text for text in in_ranks(2, body))
    faultfs.heal()
    faultfs.fail("fsync", count=1)
    assert all("Input/output error" in text and str(target) in text for text in in_ranks(2, body))
    faultfs.heal()
    assert snapshot(target) == before
    faultfs.no_rename()
    in_ranks(2, lambda world: save(state(9), VolumeWriter(target)) and None)
    assert_same(load(state(1), VolumeReader(target)), state(9))


def test_damage_that_one_rank_sees_leaves_the_tensors_of_all_ranks_alone(tmp_path: Path) -> None:
    def write(world: World) -> None:
        save({"own": per_rank(torch.full((1000,), float(world.rank)))}, VolumeWriter(tmp_path))

    def read(world: World) -> str:
        mine = {"own": per_rank(torch.full((1000,), -1.0))}
        text = refusal(lambda: load(mine, VolumeReader(tmp_path)))
        assert_same(mine["own"].value, torch.full((1000,), -1.0))
        return text

    in_ranks(2, write)
    (path,) = tmp_path.glob("__1_0.*")
    data = bytearray(path.read_bytes())
    data[-500] ^= 4
    path.write_bytes(data)
    assert all(path.name in text for text in in_ranks(2, read))
