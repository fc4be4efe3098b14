"""The private names of torch that are used behave as this package expects, on every torch that it supports."""

from __future__ import annotations

import ast
import io
import pickle
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import default_planner, filesystem
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.optim.optimizer import register_optimizer_step_pre_hook

from framework.checkpoint import compat

FRAMEWORK = Path(__file__).parents[2] / "framework"
# of torch, and not promised to stay; each is looked at by a test below
PRIVATE = {
    "compat.py": {
        "_StorageInfo", "_C", "_get_layout", "_MEM_FORMAT_ENCODING", "_validate_global_plan", "_local_tensor",
        "_foreach_copy_",
    },
}  # fmt: skip


def private_names(file: Path) -> set[str]:
    """Private attributes that a module takes from `torch` and names it imports from it."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__"):
            root: Any = node
            while isinstance(root, ast.Attribute):
                root = root.value
            if isinstance(root, ast.Name) and root.id in ("torch", "dist", "dcp"):
                found.add(node.attr)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch"):
            found |= {one.name for one in node.names if one.name.startswith("_")}
            found |= {part for part in (node.module or "").split(".") if part.startswith("_")}
    return found


def test_private_names_of_torch_are_in_one_module() -> None:
    elsewhere = {
        str(file.relative_to(FRAMEWORK)): names
        for file in sorted((FRAMEWORK / "checkpoint").rglob("*.py"))
        if file.name != "compat.py" and (names := private_names(file) - {"_foreach_copy_"})
    }
    assert elsewhere == {}
    assert private_names(FRAMEWORK / "checkpoint" / "compat.py") <= PRIVATE["compat.py"]


def test_saved_tensors_are_laid_out_as_known() -> None:
    compat.self_test()


@pytest.mark.parametrize("shape", [(), (0, 3), (5,), (3, 7), (600, 700)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool, torch.complex64])
def test_the_framing_is_what_torch_writes(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = torch.ones(shape, dtype=dtype)
    before = torch.serialization.get_crc32_options()
    frame = compat.framing(dtype, shape)
    assert torch.serialization.get_crc32_options() == before
    torch.serialization.set_crc32_options(False)
    try:
        torch.save(tensor, file := io.BytesIO())
    finally:
        torch.serialization.set_crc32_options(before)
    payload = bytes(compat.bytes_of(tensor)) if tensor.numel() else b""
    assert file.getvalue() == frame.prefix + payload + frame.suffix
    if tensor.numel():
        reader: Any = torch._C.PyTorchFileReader(io.BytesIO(file.getvalue()))
        assert reader.get_record_offset("data/0") == len(frame.prefix)


def test_a_record_is_made_of_the_known_classes_only(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save({"a": torch.ones(3), "n": {"b": torch.zeros(2, 2).half()}}, checkpoint_id=str(tmp_path), no_dist=True)
    asked: set[tuple[str, str]] = set()

    class Listening(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> Any:
            asked.add((module, name))
            return super().find_class(module, name)

    record = Listening(io.BytesIO((tmp_path / ".metadata").read_bytes())).load()
    assert {name for name in asked if name[0] != "torch"} <= set(compat.RECORD_CLASSES)
    assert {name for module, name in asked if module == "torch"} <= {"Size", "float32", "float16"}
    (place,) = {type(value) for value in record.storage_data.values()}
    assert place is compat.StorageInfo and compat.StorageInfo("f", 3, 5) == compat.StorageInfo("f", 3, 5)
    for value in record.storage_data.values():
        assert (tmp_path / value.relative_path).stat().st_size >= value.offset + value.length > 0
    assert record.version in (None, compat.DCP_VERSION)
    assert compat.DCP_VERSION == filesystem.CURRENT_DCP_VERSION and isinstance(compat.DCP_VERSION, str)


def test_a_record_may_end_in_bytes_that_torch_does_not_read(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save({"a": torch.arange(4.0)}, checkpoint_id=str(tmp_path), no_dist=True)
        with (tmp_path / ".metadata").open("ab") as file:
            file.write(b'\n{"seal":[1]}\n')
        dcp.load(loaded := {"a": torch.zeros(4)}, checkpoint_id=str(tmp_path), no_dist=True)
    assert torch.equal(loaded["a"], torch.arange(4.0))


def part(first: int, rows: int) -> SavePlan:
    offset = torch.Size([first, 0])
    data = TensorWriteData(
        ChunkStorageMetadata(offset, torch.Size([rows, 2])), TensorProperties(dtype=torch.float32), torch.Size([9, 2])
    )
    return SavePlan([WriteItem(MetadataIndex("w", offset), WriteItemType.SHARD, tensor_data=data)])


@pytest.mark.parametrize(
    ("parts", "is_right"),
    [
        ([(0, 4), (4, 5)], True),
        ([(0, 9)], True),
        ([(0, 4), (5, 4)], False),
        ([(0, 5), (4, 5)], False),
        ([(0, 4), (5, 5)], False),
    ],
)
def test_torch_checks_the_parts_of_a_tensor(parts: list[tuple[int, int]], is_right: bool) -> None:
    plans, metadata = default_planner.create_default_global_save_plan([part(*one) for one in parts])
    assert (compat.problems_of(plans, metadata) == []) is is_right
    assert [item.index.index for plan in plans for item in plan.items] == list(range(len(parts)))


def test_an_index_is_found_by_key_and_offset_alone() -> None:
    assert MetadataIndex("a", [1, 2], 3) == MetadataIndex("a", torch.Size([1, 2])) != MetadataIndex("a", [1, 3])
    assert len({MetadataIndex("a", [1, 2], 3), MetadataIndex("a", [1, 2])}) == 1


def test_the_part_behind_a_dtensor_is_its_memory(tmp_path: Path) -> None:
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    try:
        local = torch.arange(6.0)
        tensor = DTensor.from_local(local, init_device_mesh("cpu", (1,)), [Shard(0)])
        assert compat.raw_part(tensor) is compat.raw_part(tensor)
        assert compat.raw_part(tensor).data_ptr() == compat.local_part(tensor).data_ptr() == local.data_ptr()
        assert compat.is_distributed(tensor) and not compat.is_plain(tensor)
        assert not compat.is_distributed(local) and compat.raw_part(local) is local
    finally:
        dist.destroy_process_group()


def test_plain_tensors_are_told_from_others() -> None:
    class Tagged(nn.Parameter):
        pass

    class Tensorlike(torch.Tensor):
        pass

    class Logging(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return super().__torch_function__(func, types, args, kwargs or {})

    class Wrapping(torch.Tensor):
        @classmethod
        def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(*args, **(kwargs or {}))

    one = torch.zeros(2)
    for tensor in (one, nn.Parameter(one), nn.Buffer(one), Tagged(one), one.as_subclass(Tensorlike)):
        assert compat.is_plain(tensor), type(tensor)
    for tensor in (one.as_subclass(Logging), one.as_subclass(Wrapping)):
        assert not compat.is_plain(tensor), type(tensor)


def test_many_copies_at_once_convert_and_resolve_as_one_does() -> None:
    sources = [torch.arange(4.0), torch.randn(3, 4).t(), torch.randn(2, dtype=torch.complex64).conj(), torch.zeros(0)]
    targets = [torch.empty(source.shape, dtype=source.dtype) for source in sources]
    compat.copy_all(targets, sources)
    for target, source in zip(targets, sources, strict=True):
        assert torch.equal(target, source.resolve_conj())


@pytest.mark.parametrize("options", [{"foreach": True}, {"fused": True}, {"foreach": False}])
def test_the_hook_before_a_step_runs_before_anything_changes(options: dict[str, bool]) -> None:
    layer = nn.Linear(3, 3)
    optimizer = torch.optim.AdamW(layer.parameters(), lr=0.1, **options)
    layer(torch.ones(2, 3)).sum().backward()
    before, seen = layer.weight.detach().clone(), []
    handle = register_optimizer_step_pre_hook(lambda *_: seen.append(torch.equal(layer.weight, before)))
    try:
        optimizer.step()
    finally:
        handle.remove()
    optimizer.step()
    assert seen == [True] and not torch.equal(layer.weight, before)


def test_modules_and_optimizers_keep_their_parts_where_they_are_looked_for() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    model.register_buffer("loose", torch.zeros(1), persistent=False)
    assert model._non_persistent_buffers_set == {"loose"} and set(model._modules) == {"0", "1"}
    assert set(model[1]._buffers) == {"running_mean", "running_var", "num_batches_tracked"}
    assert set(model[0]._parameters) == {"weight", "bias"}
    assert not model._state_dict_hooks and not model._state_dict_pre_hooks
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(4, 2)).sum().backward()
    optimizer.step()
    state = optimizer.state[model[0].weight]
    assert {key: tuple(value.shape) for key, value in state.items()} == {
        "step": (), "exp_avg": (2, 2), "exp_avg_sq": (2, 2),
    }  # fmt: skip
