"""What is saved is what is loaded, bit for bit, by us and by stock torch."""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from checkpoint_support import (
    SOLO,
    assert_holds,
    blank,
    leaves,
    make_reader,
    make_writer,
    save,
    small_state,
    solo_group,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from framework.checkpoint import CheckpointStore, CheckpointWriter, SaveHeader, TrainState, plan
from framework.checkpoint.files import FileRecord
from framework.checkpoint.fill import fill
from framework.checkpoint.record import read_record
from framework.errors import CheckpointError, StateMismatchError

DTYPES = [
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.int64, torch.int8,
    torch.uint8, torch.uint16, torch.bool, torch.float8_e4m3fn,
]  # fmt: skip


def odd_tensors() -> dict[str, Any]:
    base = torch.randn(6, 8)
    return {
        **{str(dtype): torch.arange(7).to(dtype) for dtype in DTYPES},
        "scalar": torch.tensor(3.5),
        "count": torch.tensor(7),
        "empty": torch.zeros(0, 3),
        "transposed": base.t(),
        "slice": base[1:5, ::2],
        "expanded": torch.randn(1, 4).expand(3, 4),
        "channels_last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "conjugate": torch.randn(3, 3, dtype=torch.complex64).conj(),
        "negative": torch.randn(3, dtype=torch.complex64).conj().imag,
        "parameter": torch.nn.Parameter(torch.randn(3)),
        "with.dots": torch.randn(2),
        "long": torch.randn(700, 700),
    }


def bits(tensor: torch.Tensor) -> bytes:
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return plain.reshape(-1).view(torch.uint8).numpy().tobytes() if plain.numel() else b""


def save_tensors(store: CheckpointStore, tensors: Any, step: int = 1) -> Path:
    writer = make_writer(store)
    writer.start(TrainState(tensors), SaveHeader(step))
    (result,) = writer.wait(30)
    assert result.committed, result.error
    return result.path


def load_stock(tensors: Any, folder: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(tensors, checkpoint_id=str(folder), no_dist=True)


def test_every_kind_of_tensor_comes_back_bit_for_bit(store: CheckpointStore) -> None:
    tensors = {"model": odd_tensors()}
    save_tensors(store, tensors)
    reader = make_reader(store)
    found = reader.newest_valid()
    assert found is not None
    loaded = blank(tensors)
    reader.load(found, loaded)
    for key, tensor in tensors["model"].items():
        assert bits(loaded["model"][key]) == bits(tensor), key
        assert found.entries[f"model.{key}"] == (tensor.shape, tensor.dtype)


def test_loads_into_tensors_of_any_memory_layout(store: CheckpointStore) -> None:
    value = torch.randn(2, 3, 4, 5)
    save_tensors(store, {"a": value, "b": value.double()})
    reader = make_reader(store)
    found = reader.newest_valid()
    assert found is not None
    wide = torch.zeros(2, 3, 4, 10, dtype=torch.float64)
    live = {"a": torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last), "b": wide[..., ::2]}
    reader.load(found, live)
    assert torch.equal(live["a"], value) and torch.equal(live["b"], value.double())
    assert not wide[..., 1::2].any()


def test_a_parameter_that_needs_gradients_is_filled_in_place(store: CheckpointStore) -> None:
    layer = torch.nn.Linear(4, 3)
    save_tensors(store, {"model": dict(layer.named_parameters())})
    other = torch.nn.Linear(4, 3)
    reader = make_reader(store)
    found = reader.newest_valid()
    assert found is not None
    reader.load(found, {"model": dict(other.named_parameters())})
    assert torch.equal(other.weight, layer.weight) and other.weight.requires_grad


def test_stock_torch_reads_ours(store: CheckpointStore, tmp_path: Path) -> None:
    tensors = {"model": odd_tensors(), "optimizer": {"state": {"w": {"step": torch.tensor(2.0)}}}}
    tensors["model"]["tied"] = tensors["model"]["long"]
    folder = save_tensors(store, tensors)
    loaded = blank(tensors)
    load_stock(loaded, folder)
    dcp_to_torch_save(str(folder), str(tmp_path / "plain.pt"))
    plain = torch.load(tmp_path / "plain.pt", weights_only=True)
    for key, tensor in tensors["model"].items():
        assert bits(loaded["model"][key]) == bits(tensor), key
        assert bits(plain["model"][key]) == bits(tensor), key
    assert plain["optimizer"]["state"]["w"]["step"] == 2.0


def test_the_bytes_of_a_stock_checkpoint_can_be_read_into_tensors(tmp_path: Path) -> None:
    tensors = {key: value for key, value in odd_tensors().items() if key not in ("conjugate", "negative")}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(tensors, checkpoint_id=str(tmp_path), no_dist=True)
    sizes = {path.name: FileRecord(path.stat().st_size, ()) for path in tmp_path.iterdir()}
    record = read_record((tmp_path / ".metadata").read_bytes(), sizes)
    loaded = blank(tensors)
    fill(tmp_path, record, loaded)
    for key, tensor in tensors.items():
        assert bits(loaded[key]) == bits(tensor), key


def test_tensors_that_share_memory_are_stored_once(store: CheckpointStore) -> None:
    weight = torch.randn(500, 500)
    folder = save_tensors(store, {"model": {"embed.weight": weight, "head.weight": weight, "other": weight[:1]}})
    stored = sum(path.stat().st_size for path in folder.iterdir())
    assert weight.nbytes < stored < 1.1 * weight.nbytes
    separate = {"model": {"embed.weight": torch.zeros(500, 500), "head.weight": torch.zeros(500, 500)}}
    reader = make_reader(store)
    found = reader.newest_valid()
    assert found is not None
    reader.load(found, separate, partial=True)
    assert torch.equal(separate["model"]["embed.weight"], weight)
    assert torch.equal(separate["model"]["head.weight"], weight)


def test_values_are_those_at_start_though_the_tensors_change_at_once(store: CheckpointStore) -> None:
    state = small_state(3)
    extra = {"nested": [1, 2]}
    writer = make_writer(store)
    writer.prepare(TrainState(state.tensors, {**state.shared}, state.rank))
    shared = {**state.shared}
    writer.start(TrainState(state.tensors, shared, extra), SaveHeader(3))
    for tensor in leaves(state.tensors):
        tensor.fill_(-1)
    shared["step"] = -1
    extra["nested"].append(3)
    assert writer.wait(30)[0].committed
    assert_holds(store, 3)
    reader = make_reader(store)
    found = reader.newest_valid()
    assert found is not None and reader.read_rank(found) == {"nested": [1, 2]}


def test_a_state_that_grows_shrinks_or_changes_is_planned_anew(store: CheckpointStore) -> None:
    writer = make_writer(store)
    model = {"w": torch.randn(50, 40)}
    writer.prepare(TrainState({"model": model}))
    moments = {"w": {"exp_avg": torch.randn(50, 40)}}
    states: list[dict[str, Any]] = [
        {"model": model, "optimizer": moments},
        {"model": model},
        {"model": {"w": torch.randn(50, 41)}},
        {"model": {"w": torch.randn(50, 41).double()}},
        {"model": {"w": model["w"], "tied": model["w"]}},
        {"model": {"w": model["w"], "tied": torch.randn(50, 40)}},
        {},
    ]
    for step, tensors in enumerate(states, start=1):
        writer.start(TrainState(tensors), SaveHeader(step))
        assert writer.wait(30)[0].committed
        reader = make_reader(store)
        found = reader.newest_valid()
        assert found is not None and found.step == step
        loaded = blank(tensors)
        reader.load(found, loaded)
        for ours, theirs in zip(leaves(loaded), leaves(tensors), strict=True):
            assert torch.equal(ours, theirs)


def test_new_tensors_of_the_same_structure_are_read_anew(store: CheckpointStore) -> None:
    writer = make_writer(store)
    for step in (1, 2):
        writer.start(small_state(step), SaveHeader(step))
        writer.wait(30)
        assert_holds(store, step)


def test_large_states_are_split_over_several_files(store: CheckpointStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "FILE_BYTES", 100_000)
    tensors = {f"t{n}": torch.randn(100, 100 + n) for n in range(6)}
    folder = save_tensors(store, tensors)
    assert len(list(folder.glob("__0_*.distcp"))) == 3
    loaded = blank(tensors)
    load_stock(loaded, folder)
    assert all(torch.equal(loaded[key], tensors[key]) for key in tensors)
    reader = make_reader(store)
    found = reader.newest_valid()
    assert found is not None
    reader.load(found, again := blank(tensors))
    assert all(torch.equal(again[key], tensors[key]) for key in tensors)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    shapes=st.lists(st.lists(st.integers(0, 9), max_size=4), max_size=6),
    dtypes=st.lists(st.sampled_from(DTYPES), min_size=6, max_size=6),
)
def test_any_shapes_and_dtypes_come_back(
    tmp_path_factory: pytest.TempPathFactory, shapes: list[list[int]], dtypes: list[torch.dtype]
) -> None:
    store = CheckpointStore(tmp_path_factory.mktemp("any") / "checkpoints")
    tensors = {
        f"t{n}": torch.randint(0, 2, shape).to(dtype)
        for n, (shape, dtype) in enumerate(zip(shapes, dtypes, strict=False))
    }
    folder = save_tensors(store, tensors)
    reader = make_reader(store)
    found = reader.newest_valid()
    assert found is not None
    reader.load(found, ours := blank(tensors))
    load_stock(stock := blank(tensors), folder)
    for key, tensor in tensors.items():
        assert bits(ours[key]) == bits(tensor) == bits(stock[key])


def test_a_checkpoint_that_does_not_fit_changes_nothing_and_says_what_differs(store: CheckpointStore) -> None:
    save(store, 4)
    reader = make_reader(store)
    found = reader.newest_valid()
    assert found is not None
    live = blank(small_state(4).tensors)
    live["model"]["fc.weight"] = torch.zeros(40, 31)
    live["model"]["fc.bias"] = torch.zeros(30, dtype=torch.float64)
    live["model"]["extra"] = torch.zeros(2)
    del live["optimizer"]["main"]["state"]["fc.weight"]["step"]
    with pytest.raises(StateMismatchError) as raised:
        reader.load(found, live)
    message = str(raised.value)
    for part in (
        str(found.path),
        "missing in the checkpoint: model.extra [2] float32",
        "only in the checkpoint: optimizer.main.state.fc.weight.step [] float32",
        "model.fc.weight is [40, 30] float32 in the checkpoint and [40, 31] float32 here",
        "model.fc.bias is [30] float32 in the checkpoint and [30] float64 here",
    ):
        assert part in message
    with pytest.raises(StateMismatchError):
        reader.check(found, live)
    assert not any(tensor.any() for tensor in leaves(live))


def test_a_part_can_be_loaded_only_if_asked_for(store: CheckpointStore) -> None:
    save(store, 4)
    reader = make_reader(store)
    found = reader.open(store.list()[0])
    weights = {"model": blank(small_state(4).tensors)["model"]}
    with pytest.raises(StateMismatchError, match="only in the checkpoint: optimizer"):
        reader.load(found, weights)
    reader.load(found, weights, partial=True)
    assert torch.equal(weights["model"]["fc.weight"], small_state(4).tensors["model"]["fc.weight"])


def test_a_rank_that_was_not_there_has_no_file(store: CheckpointStore) -> None:
    save(store, 4)
    reader = make_reader(store)
    found = reader.newest_valid()
    assert found is not None
    values = reader.read_rank(found)
    assert values is not None and torch.equal(values["rng"], torch.arange(5) + 4)
    reader.world = type(SOLO)(3, 4, 3, 4, SOLO.device)
    assert reader.read_rank(found) is None


def test_nothing_published_is_none(store: CheckpointStore) -> None:
    assert make_reader(store).newest_valid() is None
    store.path.mkdir(parents=True)
    store.folder(3).mkdir()
    assert make_reader(store).newest_valid() is None


def test_the_header_is_in_the_manifest(store: CheckpointStore) -> None:
    header = SaveHeader(
        9, position=72, epoch=1, skipped=2, reason="final", metrics={"top1": 0.5, "bad": float("nan")},
        finished="max_steps", elapsed_seconds=12.5, extra={"layout": "ddp"}, pinned=True, health="good",
    )  # fmt: skip
    result = save(store, 9, header=header)
    (found,) = store.list()
    manifest = found.manifest
    assert (manifest.step, manifest.position, manifest.epoch, manifest.skipped) == (9, 72, 1, 2)
    assert (manifest.reason, manifest.finished, manifest.elapsed_seconds) == ("final", "max_steps", 12.5)
    assert manifest.metrics["top1"] == 0.5 and manifest.metrics["bad"] != manifest.metrics["bad"]
    assert manifest.unknown == {"layout": "ddp"} and manifest.pinned and manifest.health == "good"
    assert (manifest.run, manifest.attempt, manifest.world_size) == ("a-run", 1, 1)
    assert manifest.versions["torch"] == torch.__version__ and manifest.threads == torch.get_num_threads()
    assert manifest.size == result.bytes


@pytest.mark.parametrize(
    ("tensors", "part"),
    [
        ({"model": {"lr": 0.1}}, "'model.lr' is a float, not a tensor"),
        ({"a": torch.eye(3).to_sparse()}, "layout torch.sparse_coo"),
        ({"a": torch.zeros(3, device="meta")}, "meta device"),
        ({"a": {"b": torch.zeros(1)}, "a.b": torch.zeros(1)}, "the key 'a.b'"),
    ],
)
def test_a_state_that_cannot_be_saved_is_refused_by_key(store: CheckpointStore, tensors: Any, part: str) -> None:
    writer = make_writer(store)
    for call in (lambda: writer.prepare(TrainState(tensors)), lambda: writer.start(TrainState(tensors), SaveHeader(1))):
        with pytest.raises(CheckpointError, match=re.escape(part)):
            call()
    assert not writer.busy and not store.list()


def test_closing_gives_back_and_twice_is_fine(store: CheckpointStore) -> None:
    writer = CheckpointWriter(
        store, SOLO, solo_group(), run="r", attempt=1, token="t", is_owner=lambda: True, timeout_seconds=10
    )
    writer.prepare(small_state(1))
    writer.start(small_state(1), SaveHeader(1))
    writer.close()
    writer.close()
    assert writer.poll()[0].committed
