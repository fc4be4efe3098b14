"""Several ranks save and load as one, or all hear the same error."""

from __future__ import annotations

import os
import resource
import time
from pathlib import Path
from typing import Any

import torch
from checkpoint_support import assert_holds, blank, die, in_ranks, leaves, make_reader, make_writer, save, snapshot

from framework.checkpoint import CheckpointReader, CheckpointStore, SaveHeader, SaveResult, TrainState
from framework.distributed import Group, World
from framework.errors import CheckpointError, DistributedError, StateMismatchError


def replicas(step: int, rank: int) -> TrainState:
    """A model with one large tensor last; buffers only on rank 0; a value of each rank's own."""
    generator = torch.Generator().manual_seed(step)
    model = {f"layer{n}": torch.randn(100, 20, generator=generator) for n in range(10)}
    model["table"] = torch.randn(100, 150, generator=generator)
    model["tied"] = model["table"]
    if rank == 0:
        model["running_mean"] = torch.full((7,), float(step))
    return TrainState({"model": model}, {"step": step}, {"rank": rank, "rng": torch.arange(3) + rank})


def own_group(world: World, seconds: float = 20.0) -> Group:
    return Group(world, timeout_seconds=seconds, name="checkpoint")


def saving(world: World, path: Path, steps: list[int]) -> list[SaveResult]:
    store = CheckpointStore(path)
    writer = make_writer(store, world=world, group=own_group(world))
    writer.prepare(replicas(0, world.rank))
    results = []
    for step in steps:
        writer.start(replicas(step, world.rank), SaveHeader(step))
        results += writer.wait(30)
    writer.close()
    return results


def loading(world: World, path: Path) -> dict[str, Any]:
    store = CheckpointStore(path)
    reader = CheckpointReader(store, world, own_group(world))
    found = reader.newest_valid()
    assert found is not None
    expected = replicas(found.step, 0).tensors
    loaded = blank(expected)
    reader.load(found, loaded)
    assert all(torch.equal(a, b) for a, b in zip(leaves(loaded), leaves(expected), strict=True))
    values = reader.read_rank(found)
    rejected = [(str(item.path), item.reason) for item in reader.rejected]
    rank = values["rank"] if values else None
    return {"step": found.step, "rank": rank, "shared": reader.read_shared(found), "rejected": rejected}


def test_two_ranks_save_one_checkpoint_that_any_number_loads(store: CheckpointStore) -> None:
    first, second = in_ranks(2, saving, store.path, [1, 2])
    assert first == second and [result.committed for result in first] == [True, True]
    assert first[0].bytes == store.list()[1].manifest.size
    loaded = in_ranks(3, loading, store.path)
    assert [answer["step"] for answer in loaded] == [2, 2, 2]
    assert [answer["rank"] for answer in loaded] == [0, 1, None]
    assert loaded[0]["shared"] == {"step": 2}
    (alone,) = in_ranks(1, loading, store.path)
    assert alone["rank"] == 0
    assert store.list()[0].manifest.world_size == 2 and len(store.list()[0].manifest.rank_files) == 2


def test_the_bytes_are_shared_evenly_even_with_one_large_tensor_last(store: CheckpointStore) -> None:
    in_ranks(2, saving, store.path, [1])
    sizes = [path.stat().st_size for path in sorted(store.folder(1).glob("__*_0.*.distcp"))]
    assert len(sizes) == 2 and max(sizes) < 1.05 * sum(sizes) / 2
    assert sum(sizes) < 1.4 * 4 * (100 * 150 + 10 * 2000)  # the tied table is not stored again


def failing(world: World, path: Path) -> list[SaveResult]:
    store = CheckpointStore(path)
    writer = make_writer(store, world=world, group=own_group(world))
    writer.prepare(replicas(1, world.rank))
    if world.rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, resource.RLIM_INFINITY))
    writer.start(replicas(2, world.rank), SaveHeader(2))
    results = writer.wait(30)
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    writer.start(replicas(3, world.rank), SaveHeader(3))
    return results + writer.wait(30)


def test_a_rank_that_cannot_write_is_reported_on_all_ranks_and_nothing_is_published(store: CheckpointStore) -> None:
    save(store, 1)
    first, second = in_ranks(2, failing, store.path)
    assert first == second
    failed, good = first
    assert not failed.committed and good.committed
    assert failed.error is not None
    assert failed.error.startswith("rank 1: ") and "File too large" in failed.error
    assert str(store.folder(2)) in failed.error
    assert [found.step for found in store.list()] == [3, 1]
    assert not store.folder(2).exists()


def changing(world: World, path: Path) -> list[bool]:
    """Only rank 1's state grows: all must plan anew."""
    store = CheckpointStore(path)
    writer = make_writer(store, world=world, group=own_group(world))
    outcomes = []
    for step in (1, 2, 3):
        tensors: dict[str, Any] = {"model": {"w": torch.full((30, 30), float(step))}}
        if world.rank == 1 and step > 1:
            tensors["model"]["only1"] = torch.full((5,), float(step))
        writer.start(TrainState(tensors), SaveHeader(step))
        outcomes += [result.committed for result in writer.wait(30)]
    return outcomes


def test_a_structure_that_changes_on_one_rank_is_planned_anew_by_all(store: CheckpointStore) -> None:
    assert in_ranks(2, changing, store.path) == [[True] * 3] * 2
    reader = make_reader(store)
    found = reader.newest_valid()
    assert found is not None and found.step == 3
    live = {"model": {"w": torch.zeros(30, 30), "only1": torch.zeros(5)}}
    reader.load(found, live)
    assert torch.equal(live["model"]["w"], torch.full((30, 30), 3.0))
    assert torch.equal(live["model"]["only1"], torch.full((5,), 3.0))


def disagreeing(world: World, path: Path) -> list[str]:
    store = CheckpointStore(path)
    writer = make_writer(store, world=world, group=own_group(world))
    plain = TrainState({"w": torch.zeros(3)})
    errors = []
    for state, step in (
        (plain, 1 + world.rank),
        (TrainState({"w": torch.zeros(3 + world.rank)}), 5),
        (TrainState({"w": "text"}) if world.rank else plain, 5),
    ):
        try:
            writer.start(state, SaveHeader(step))
        except CheckpointError as error:
            errors.append(str(error))
    writer.start(plain, SaveHeader(6))
    assert writer.wait(30)[0].committed
    return errors


def test_states_that_do_not_fit_together_are_the_same_error_on_all_ranks(store: CheckpointStore) -> None:
    first, second = in_ranks(2, disagreeing, store.path)
    assert first == second and len(first) == 3
    assert "rank 0: 1, rank 1: 2" in first[0]
    assert "'w' has shape and dtype" in first[1] and "rank 1" in first[1]
    assert first[2].startswith("rank 1: The state under 'w' is a str")


def blocked(world: World, path: Path) -> str:
    store = CheckpointStore(path / str(world.rank))
    writer = make_writer(store, world=world, group=own_group(world))
    try:
        writer.prepare(replicas(1, world.rank))
    except CheckpointError as error:
        return str(error)
    return "prepared"


def test_a_target_that_one_rank_cannot_write_stops_all(tmp_path: Path) -> None:
    (tmp_path / "1").write_text("in the way")
    first, second = in_ranks(2, blocked, tmp_path)
    assert first == second and first.startswith("rank 1: Checkpoints cannot be written to ")


def dying(world: World, path: Path) -> tuple[bool, str]:
    store = CheckpointStore(path)
    writer = make_writer(store, world=world, group=own_group(world, 3.0))
    writer.prepare(replicas(1, world.rank))
    if world.rank == 1:
        real = os.fsync
        os.fsync = lambda fd: (die(), real(fd))[1]  # type: ignore[assignment]
    writer.start(replicas(2, world.rank), SaveHeader(2))
    (result,) = writer.wait(20)
    assert result.error is not None
    return result.committed, result.error


def test_a_rank_killed_while_writing_fails_the_save_of_the_others_in_time(store: CheckpointStore) -> None:
    save(store, 1)
    (committed, error), gone = in_ranks(2, dying, store.path, spared=1)
    assert gone is None and not committed and error.startswith("rank 1 did not come ")
    assert [found.step for found in store.list()] == [1]
    store.sweep(2)
    assert not store.folder(2).exists()
    assert_holds(store, 1)


def alone(world: World, path: Path) -> str:
    store = CheckpointStore(path)
    writer = make_writer(store, world=world, group=own_group(world, 2.0), timeout_seconds=2.0)
    given_up = path.parent / "given-up"
    if world.rank == 1:
        while not given_up.exists():
            time.sleep(0.02)
        return ""
    try:
        writer.start(replicas(2, world.rank), SaveHeader(2))
    except DistributedError as error:
        return str(error)
    finally:
        given_up.touch()
    return "started"


def test_a_rank_that_does_not_come_is_an_error_in_time(store: CheckpointStore) -> None:
    store.path.parent.mkdir()
    first, _ = in_ranks(2, alone, store.path)
    assert first.startswith("rank 1 did not come within 2 s while beginning to save step 2")
    assert not store.path.exists()


def test_damage_in_one_ranks_share_is_agreed_by_all(store: CheckpointStore) -> None:
    in_ranks(2, saving, store.path, [1, 2])
    for kind in ("__1_0", "rank_1", "__0_0"):
        (path,) = store.folder(2).glob(f"{kind}.*")
        whole = path.read_bytes()
        data = bytearray(whole)
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
        first, second = in_ranks(2, loading, store.path)
        assert first["step"] == second["step"] == 1
        assert first["rejected"] == second["rejected"] and kind in first["rejected"][0][1]
        moved = store.path / "damaged" / store.folder(2).name
        os.rename(moved, store.folder(2))
        (store.path / "damaged" / f"{moved.name}.reason.txt").unlink()
        path.write_bytes(whole)
    assert [answer["step"] for answer in in_ranks(2, loading, store.path)] == [2, 2]


def none_whole(world: World, path: Path) -> str:
    try:
        CheckpointReader(CheckpointStore(path), world, own_group(world)).newest_valid()
    except CheckpointError as error:
        return str(error)
    return "found"


def test_all_damaged_is_the_same_error_on_all_ranks(store: CheckpointStore) -> None:
    in_ranks(2, saving, store.path, [1])
    (path,) = store.folder(1).glob("__1_0.*")
    path.write_bytes(bytes(path.stat().st_size))
    before = snapshot(store.path)
    first, second = in_ranks(2, none_whole, store.path)
    assert first == second and str(store.folder(1)) in first and "__1_0" in first
    assert snapshot(store.path) == before


def mismatching(world: World, path: Path) -> tuple[str, bool]:
    reader = CheckpointReader(CheckpointStore(path), world, own_group(world))
    found = reader.newest_valid()
    assert found is not None
    live = blank(replicas(1, 0).tensors)
    if world.rank == 1:
        live["model"]["layer3"] = torch.zeros(4)
    try:
        reader.load(found, live)
    except StateMismatchError as error:
        return str(error), any(bool(tensor.any()) for tensor in leaves(live))
    return "loaded", True


def test_a_state_that_does_not_fit_on_one_rank_is_loaded_by_none(store: CheckpointStore) -> None:
    in_ranks(2, saving, store.path, [1])
    first, second = in_ranks(2, mismatching, store.path)
    assert first == second and first[1] is False
    assert first[0].startswith("rank 1: ") and "model.layer3 is [100, 20]" in first[0]


def sharded(world: World, path: Path, is_saving: bool) -> bool:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (world.size,))
    whole = torch.arange(17 * 6, dtype=torch.float32).view(17, 6)
    store = CheckpointStore(path)
    if is_saving:
        state = TrainState({"w": distribute_tensor(whole, mesh, [Shard(0)])})
        writer = make_writer(store, world=world, group=own_group(world))
        writer.start(state, SaveHeader(1))
        return writer.wait(30)[0].committed
    live = distribute_tensor(torch.zeros(17, 6), mesh, [Shard(1)])
    reader = CheckpointReader(store, world, own_group(world))
    found = reader.newest_valid()
    assert found is not None
    reader.load(found, {"w": live})
    return torch.equal(live.full_tensor(), whole)


def test_shards_of_one_layout_load_into_another(store: CheckpointStore) -> None:
    assert in_ranks(2, sharded, store.path, True) == [True, True]
    assert in_ranks(3, sharded, store.path, False) == [True, True, True]
    reader = make_reader(store)
    found = reader.newest_valid()
    assert found is not None
    reader.load(found, live := {"w": torch.zeros(17, 6)})
    assert torch.equal(live["w"], torch.arange(17 * 6, dtype=torch.float32).view(17, 6))
