"""Replicas are written once, and every rank writes about the same."""

from __future__ import annotations

import math
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from checkpoint_support import blank, in_ranks, leaves, make_reader, make_writer
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from framework.checkpoint import CheckpointReader, CheckpointStore, SaveHeader, TrainState, compat
from framework.checkpoint.spread import Piece, divide
from framework.distributed import Group, World

ROWS = {0.33: 3000, 0.5: 6000, 0.9: 54_000}  # of the embedding, for its part of all bytes; the rest has 6,000


def item(key: str, shape: tuple[int, ...], first: int = 0, of: tuple[int, ...] | None = None) -> WriteItem:
    offset = torch.Size([first, *[0] * (len(shape) - 1)]) if shape else torch.Size([])
    properties = dcp.metadata.TensorProperties(dtype=torch.float32)
    data = TensorWriteData(ChunkStorageMetadata(offset, torch.Size(shape)), properties, torch.Size(of or shape))
    return WriteItem(MetadataIndex(key, offset), WriteItemType.SHARD if of else WriteItemType.TENSOR, tensor_data=data)


def bytes_of(pieces: list[Piece]) -> int:
    return sum(math.prod(one.item.tensor_data.chunk.sizes) * 4 for one in pieces if one.item.tensor_data)


@settings(max_examples=60, deadline=None)
@given(
    shapes=st.lists(st.lists(st.integers(0, 40), max_size=3), max_size=30),
    ranks=st.integers(1, 5),
)
def test_any_state_is_written_once(shapes: list[list[int]], ranks: int) -> None:
    items = [item(f"t{number}", tuple(shape)) for number, shape in enumerate(shapes)]
    divided = divide([SavePlan(items)] * ranks)
    assert divided == divide([SavePlan(items)] * ranks)
    rows: dict[str, list[tuple[int, int]]] = {}
    for pieces in divided:
        for one in pieces:
            data = one.item.tensor_data
            assert data is not None and data.chunk.offsets == one.item.index.offset
            if one.cut is None:
                assert data.chunk.sizes == data.size
            else:
                assert one.cut == (data.chunk.offsets[0], data.chunk.sizes[0]) and one.cut[1] > 0
                assert data.chunk.sizes[1:] == data.size[1:]
            rows.setdefault(one.item.index.fqn, []).append(one.cut or (0, data.size[0] if data.size else 1))
    assert set(rows) == {one.index.fqn for one in items}
    for number, shape in enumerate(shapes):
        expected = 0
        for first, count in sorted(rows[f"t{number}"]):
            assert first == expected
            expected += count
        assert expected == (shape[0] if shape else 1)
    assert sum(map(len, divided)) <= len(items) + ranks  # each cut fills one rank


@pytest.mark.parametrize("ranks", [2, 3, 8])
@pytest.mark.parametrize("part", ROWS)
def test_bytes_are_even_with_one_large_embedding(part: float, ranks: int) -> None:
    items = [item(f"layer{n}", (100, 50 + n)) for n in range(60)]
    items += [item(f"embedding.{kind}", (ROWS[part], 150)) for kind in ("weight", "exp_avg")]
    sizes = [bytes_of(pieces) for pieces in divide([SavePlan(items)] * ranks)]
    assert max(sizes) < 1.05 * sum(sizes) / ranks and min(sizes) > 0.95 * sum(sizes) / ranks


def test_thousands_of_small_tensors_are_even_in_number_too() -> None:
    divided = divide([SavePlan([item(f"t{n}", (7,)) for n in range(3000)])] * 4)
    assert {len(pieces) for pieces in divided} <= set(range(735, 766))


def test_what_one_rank_alone_holds_stays_with_it_and_the_others_even_it_out() -> None:
    common = [item(f"t{n}", (100, 100)) for n in range(30)]
    mine = [item("shard", (500, 100), of=(1000, 100)), item("shard", (500, 100), 500, (1000, 100))]
    extra = item("only0", (900, 100))
    divided = divide([SavePlan([*common, mine[0], extra]), SavePlan([*common, mine[1]])])
    assert {"only0", "shard"} <= {one.item.index.fqn for one in divided[0]}
    assert [one.item.index.offset for one in divided[1] if one.item.index.fqn == "shard"] == [torch.Size([500, 0])]
    sizes = [bytes_of(pieces) for pieces in divided]
    assert max(sizes) < 1.05 * sum(sizes) / 2


def replicas(part: float, step: int) -> dict[str, Any]:
    """A model of equal layers, an embedding, and what is odd: no rows, one row, nothing at all, shared memory."""
    generator = torch.Generator().manual_seed(step)
    model: dict[str, torch.Tensor] = {f"layer{n}.weight": torch.randn(100, 50, generator=generator) for n in range(10)}
    model["embedding"] = torch.randn(int(ROWS[part] / 6), 50, generator=generator)
    model["tied"] = model["embedding"]
    model |= {"scalar": torch.tensor(float(step)), "empty": torch.zeros(0, 4), "row": torch.randn(1, 9)}
    model["row"].fill_(step)
    model["few"] = torch.randn(3, 11, generator=generator)
    return {"model": model, "optimizer": {"state": {"embedding": {"step": torch.tensor(float(step))}}}}


def same(loaded: Any, expected: Any) -> bool:
    return all(torch.equal(a, b) for a, b in zip(leaves(loaded), leaves(expected), strict=True))


def group_of(world: World) -> Group:
    return Group(world, timeout_seconds=60, name="checkpoint")


def saving(world: World, path: Path, part: float) -> None:
    writer = make_writer(CheckpointStore(path), world=world, group=group_of(world))
    for step in (1, 2):
        writer.start(TrainState(replicas(part, step)), SaveHeader(step))
        assert writer.wait(60)[0].committed
    writer.close()


def loading(world: World, path: Path, part: float) -> tuple[bool, bool]:
    """Whether our reader and stock torch read the newest checkpoint."""
    reader = CheckpointReader(CheckpointStore(path), world, group_of(world))
    found = reader.newest_valid()
    assert found is not None and found.step == 2
    expected = replicas(part, 2)
    reader.load(found, ours := blank(expected))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(stock := blank(expected), checkpoint_id=str(found.path))
    return same(ours, expected), same(stock, expected)


@pytest.mark.parametrize(
    ("part", "ranks", "readers"), [(0.33, 1, 2), (0.33, 4, 1), (0.5, 2, 1), (0.9, 4, 2), (0.9, 2, 4)]
)
def test_ranks_share_the_bytes_of_one_copy_that_any_number_of_ranks_reads(
    store: CheckpointStore, part: float, ranks: int, readers: int
) -> None:
    in_ranks(ranks, saving, store.path, part)
    folder = store.folder(2)
    sizes = [sum(file.stat().st_size for file in folder.glob(f"__{rank}_*.distcp")) for rank in range(ranks)]
    payload = sum(tensor.nbytes for tensor in leaves(replicas(part, 1))) - replicas(part, 1)["model"]["tied"].nbytes
    assert payload < sum(sizes) < 1.15 * payload + 70_000  # 3 KB around each tensor
    assert max(sizes) < 1.05 * sum(sizes) / ranks and min(sizes) > 0.95 * sum(sizes) / ranks
    assert in_ranks(readers, loading, store.path, part) == [(True, True)] * readers


def test_more_ranks_than_rows(store: CheckpointStore) -> None:
    in_ranks(4, few_rows, store.path)
    reader = make_reader(store)
    found = reader.newest_valid()
    assert found is not None
    reader.load(found, loaded := {"a": torch.zeros(2, 10000), "b": torch.zeros(()), "c": torch.zeros(0)})
    assert torch.equal(loaded["a"], torch.arange(20000.0).view(2, 10000)) and loaded["b"] == 5
    sizes = [file.stat().st_size for file in found.path.glob("__*.distcp")]
    assert sorted(size > 40_000 for size in sizes)[-2:] == [True, True] and sum(sizes) < 100_000


def few_rows(world: World, path: Path) -> None:
    writer = make_writer(CheckpointStore(path), world=world, group=group_of(world))
    tensors = {"a": torch.arange(20000.0).view(2, 10000), "b": torch.tensor(5.0), "c": torch.zeros(0)}
    writer.start(TrainState(tensors), SaveHeader(1))
    assert writer.wait(60)[0].committed
    writer.close()


def hybrid(world: World, path: Path) -> tuple[list[tuple[str, tuple[int, int] | None]], bool]:
    """Two copies of two shards: a shard is divided between the ranks that hold it."""
    whole = torch.arange(400_000.0).view(40, 10_000)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "shards"))
    row = mesh.get_coordinate()[1] * 20
    live = DTensor.from_local(whole[row : row + 20].clone(), mesh, [Replicate(), Shard(0)])
    writer = make_writer(CheckpointStore(path), world=world, group=group_of(world))
    writer.start(TrainState({"w": live}), SaveHeader(1))
    assert writer.wait(60)[0].committed
    cuts = [(entry.key, entry.cut) for entry in writer._plan.layouts[world.rank].entries]  # type: ignore[union-attr]
    writer.close()
    reader = CheckpointReader(CheckpointStore(path), world, group_of(world))
    found = reader.newest_valid()
    assert found is not None
    live.to_local().zero_()
    reader.load(found, {"w": live})
    return cuts, torch.equal(live.to_local(), whole[row : row + 20])


def test_copies_of_a_shard_are_divided_between_the_ranks_that_hold_it(store: CheckpointStore) -> None:
    answers = in_ranks(4, hybrid, store.path)
    assert [is_right for _, is_right in answers] == [True] * 4
    assert sorted(cut for cuts, _ in answers for _, cut in cuts if cut) == [(0, 10), (0, 10), (10, 10), (10, 10)]
    reader = make_reader(store)
    found = reader.newest_valid()
    assert found is not None
    reader.load(found, loaded := {"w": torch.zeros(40, 10_000)})
    assert torch.equal(loaded["w"], torch.arange(400_000.0).view(40, 10_000))


def test_a_plan_that_leaves_a_gap_is_refused() -> None:
    from torch.distributed.checkpoint.default_planner import create_default_global_save_plan

    halves = [SavePlan([item("a", (5, 2), 0, (10, 2))]), SavePlan([item("a", (4, 2), 6, (10, 2))])]
    assert compat.problems_of(*create_default_global_save_plan(halves))
    halves[1] = SavePlan([item("a", (5, 2), 5, (10, 2))])
    assert not compat.problems_of(*create_default_global_save_plan(halves))
