"""A plan holds as long as the state is made of the same tensors, and what cannot be saved is named."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from checkpoint_support import blank, leaves, make_reader, make_writer, solo_group

from framework.checkpoint import CheckpointStore, SaveHeader, TrainState
from framework.checkpoint.plan import agree, describe, part_of
from framework.errors import CheckpointError


def state() -> dict[str, Any]:
    weight = torch.randn(6, 6)
    return {
        "model": {"fc.weight": torch.nn.Parameter(weight), "fc.bias": torch.randn(6), "tied": weight},
        "optimizer": {"main": {"state": {"fc.weight": {"exp_avg": torch.randn(6, 6), "step": torch.tensor(1.0)}}}},
        "empty": {},
        "left": {"x": torch.randn(2), "y": torch.randn(2)},
        "right": {"z": torch.randn(2)},
    }


def copied(tensors: Any) -> Any:
    """Other mappings with the same tensors."""
    return {key: copied(value) for key, value in tensors.items()} if isinstance(tensors, dict) else tensors


def test_an_unchanged_state_is_not_described_again() -> None:
    tensors = state()
    flat = describe(tensors)
    for tensor in leaves(tensors):
        tensor.detach().add_(1)
    assert describe(tensors, flat) is flat
    assert describe(copied(tensors), flat) is flat


def moment(tensors: dict[str, Any]) -> dict[str, torch.Tensor]:
    return tensors["optimizer"]["main"]["state"]["fc.weight"]  # type: ignore[no-any-return]


def other_data(tensors: dict[str, Any]) -> None:
    tensors["model"]["fc.weight"].data = torch.randn(6, 6)


def turned(tensors: dict[str, Any]) -> None:
    tensors["model"]["fc.weight"].data = tensors["model"]["fc.weight"].data.t()


def other_dtype(tensors: dict[str, Any]) -> None:
    tensors["model"]["fc.bias"].data = tensors["model"]["fc.bias"].data.view(torch.int32)


def moved_key(tensors: dict[str, Any]) -> None:
    tensors["empty"]["fc.bias"] = tensors["model"].pop("fc.bias")


def renamed(tensors: dict[str, Any]) -> None:
    tensors["model"] = {f"new.{key}": value for key, value in tensors["model"].items()}


def over_the_border(tensors: dict[str, Any]) -> None:
    """All keys and tensors stay in their order, one is in the mapping next to its own."""
    tensors["right"].update({"y": tensors["left"].pop("y"), "z": tensors["right"].pop("z")})


CHANGES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "replaced": lambda tensors: moment(tensors).update(exp_avg=torch.randn(6, 6)),
    "resized": lambda tensors: moment(tensors)["exp_avg"].resize_(4, 9),
    "cut short": lambda tensors: tensors["model"]["fc.bias"].resize_(5),
    "other data": other_data,
    "turned": turned,
    "other dtype": other_dtype,
    "more": lambda tensors: moment(tensors).update(more=torch.zeros(1)),
    "fewer": lambda tensors: moment(tensors).pop("step"),
    "moved": moved_key,
    "over the border": over_the_border,
    "renamed": renamed,
    "nested": lambda tensors: tensors["model"].update({"fc.bias": {"x": tensors["model"]["fc.bias"]}}),
}


@pytest.mark.parametrize("is_copied", [False, True])
@pytest.mark.parametrize("name", CHANGES)
def test_whatever_changes_is_noticed(name: str, is_copied: bool) -> None:
    tensors = state()
    flat = describe(tensors)
    if is_copied:
        tensors = copied(tensors)
    CHANGES[name](tensors)
    again = describe(tensors, flat)
    assert again is not flat
    assert {key: id(value) for key, value in again.tensors.items()} == {
        key: id(value) for key, value in describe(copied(tensors)).tensors.items()
    }


def test_untied_weights_are_planned_apart_though_no_key_changed() -> None:
    tensors = state()
    flat = describe(tensors)
    assert flat.aliases == {"model.tied": "model.fc.weight"}
    tensors["model"]["fc.weight"].data = tensors["model"]["tied"].clone()
    again = describe(tensors, flat)
    assert not again.aliases and again.signature != flat.signature


class Tagged(torch.nn.Parameter):
    """A parameter with a mark, as model-parallel libraries make them."""


class Strange(torch.Tensor):
    """A tensor that does something else."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return super().__torch_function__(func, types, args, kwargs or {})


def quantized() -> torch.Tensor:
    return torch.quantize_per_tensor(torch.zeros(3), 0.1, 0, torch.qint8)


@pytest.mark.filterwarnings("ignore")  # of torch, on kinds of tensors that it will drop
@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (lambda: torch.eye(3).to_sparse(), "has layout torch.sparse_coo"),
        (lambda: torch.eye(3).to_sparse_csr(), "has layout torch.sparse_csr"),
        (quantized, "is quantized"),
        (lambda: torch.zeros(3, device="meta"), "is on the meta device"),
        (lambda: torch.zeros(3).as_subclass(Strange), "is a Strange"),
        (lambda: torch.nn.UninitializedParameter(), "is a UninitializedParameter"),
        (lambda: torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)], layout=torch.jagged), "has layout"),
    ],
)
def test_what_cannot_be_saved_is_named(make: Callable[[], torch.Tensor], problem: str) -> None:
    with pytest.raises(CheckpointError, match=re.escape("'model.odd' ") + ".*" + re.escape(problem)):
        describe({"model": {"odd": make()}})


def test_unusual_tensors_are_saved_as_what_they_mean(store: CheckpointStore) -> None:
    base = torch.randn(4, 4, dtype=torch.complex64)
    tensors = {
        "tagged": Tagged(torch.randn(3)), "conj": base.conj(), "plain": base, "neg": base.conj().imag,
        "expanded": torch.randn(1, 3).expand(5, 3), "turned": base.t(), "strided": torch.randn(9)[::2],
    }  # fmt: skip
    expected = {key: value.detach().resolve_conj().resolve_neg().clone() for key, value in tensors.items()}
    writer = make_writer(store)
    writer.start(TrainState(tensors), SaveHeader(1))
    assert writer.wait(30)[0].committed
    reader = make_reader(store)
    found = reader.newest_valid()
    assert found is not None
    reader.load(found, loaded := blank(tensors))
    for key, value in expected.items():
        assert torch.equal(loaded[key], value), key


def test_values_are_read_into_tensors_that_mean_others(store: CheckpointStore) -> None:
    value = torch.randn(3, 3, dtype=torch.complex64)
    writer = make_writer(store)
    writer.start(TrainState({"conj": value, "neg": value.imag.clone()}), SaveHeader(1))
    assert writer.wait(30)[0].committed
    reader = make_reader(store)
    found = reader.newest_valid()
    assert found is not None
    live = {"conj": torch.zeros(3, 3, dtype=torch.complex64).conj(), "neg": torch.zeros(3, 3, dtype=torch.complex64)}
    live["neg"] = live["neg"].conj().imag
    reader.load(found, live)
    assert torch.equal(live["conj"].resolve_conj(), value) and torch.equal(live["neg"].resolve_neg(), value.imag)


def test_part_of_is_what_the_entry_says() -> None:
    tensors = {"a": torch.arange(12.0).view(4, 3), "b": torch.nn.Parameter(torch.zeros(2))}
    flat = describe(tensors)
    (layout,) = agree(flat, solo_group()).layouts
    for entry in layout.entries:
        part = part_of(flat.tensors[entry.key], entry)
        assert part.data_ptr() == tensors[entry.key].data_ptr() and part.shape == entry.shape
        assert not part.requires_grad
