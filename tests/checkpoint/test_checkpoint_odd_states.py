"""States that few models have: what is written is what they mean, and what could not be read again is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_support import make_reader, make_writer
from dcp_states import REFUSED, load, save

from framework.checkpoint import CheckpointStore, SaveHeader, TrainState, VolumeReader, VolumeWriter
from framework.errors import CheckpointError


def saved(store: CheckpointStore, tensors: dict[str, Any], *, overlap: str = "off") -> None:
    """Three saves, each with an update after it."""
    writer = make_writer(store, overlap=overlap)
    state = TrainState(tensors, settled=list(tensors))
    writer.prepare(state)
    for step in (1, 2, 3):
        writer.start(state, SaveHeader(step))
        writer.fence(before_update=True)
        (result,) = writer.wait(30)
        assert result.committed, result.error
    writer.close()


def loaded(store: CheckpointStore, tensors: dict[str, Any]) -> dict[str, Any]:
    reader = make_reader(store)
    found = reader.newest_valid()
    assert found is not None
    reader.load(found, tensors)
    return tensors


def mirrored() -> dict[str, torch.Tensor]:
    """Tensors that share their memory and differ in how it is read."""
    value = torch.arange(6.0).view(2, 3) + 1j
    return {"value": value, "conj": value.conj(), "imag": value.imag, "neg": value.conj().imag}


def test_a_conjugate_beside_its_tensor_is_saved_as_itself_by_plain_saves(tmp_path: Path) -> None:
    save(mirrored(), VolumeWriter(tmp_path))
    found = load({key: torch.zeros_like(value.resolve_conj().resolve_neg()) for key, value in mirrored().items()},
                 VolumeReader(tmp_path))  # fmt: skip
    for key, value in mirrored().items():
        assert torch.equal(found[key], value), key


@pytest.mark.parametrize("overlap", ["on", "off"])
def test_a_run_saves_conjugates_beside_steps_and_goes_on_with_them(store: CheckpointStore, overlap: str) -> None:
    saved(store, mirrored(), overlap=overlap)
    live = mirrored()
    live["value"].zero_()
    for key, value in mirrored().items():
        assert torch.equal(loaded(store, live)[key], value), key


def test_no_key_is_taken_for_the_tag_of_a_save(store: CheckpointStore) -> None:
    keys = ("@" * 23, "a" + "@" * 50, "A" * 30)
    saved(store, {key: torch.ones(2) for key in keys})
    assert all(
        torch.equal(value, torch.ones(2)) for value in loaded(store, dict.fromkeys(keys, torch.zeros(2))).values()
    )


def test_a_run_with_an_expanded_buffer_can_be_resumed(store: CheckpointStore) -> None:
    saved(store, {"buffer": torch.tensor([[1.0], [2.0]]).expand(2, 5), "weight": torch.ones(3)})
    live = loaded(store, {"buffer": torch.zeros(2, 1).expand(2, 5), "weight": torch.zeros(3)})
    assert torch.equal(live["buffer"], torch.tensor([[1.0], [2.0]]).expand(2, 5))


def test_what_does_not_fit_in_an_expanded_buffer_is_refused(store: CheckpointStore) -> None:
    saved(store, {"buffer": torch.arange(10.0).view(2, 5)})
    with pytest.raises(CheckpointError, match=r"different values .* expanded here"):
        loaded(store, {"buffer": torch.zeros(2, 1).expand(2, 5)})


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
    ],
)
def test_plain_saves_refuse_by_name_what_could_not_be_loaded(
    tmp_path: Path, make: Callable[[], torch.Tensor], problem: str
) -> None:
    with pytest.raises(REFUSED, match=f"'model.odd' {problem}"):
        save({"model": {"odd": make(), "even": torch.ones(2)}}, VolumeWriter(tmp_path))
    assert not list(tmp_path.iterdir())
