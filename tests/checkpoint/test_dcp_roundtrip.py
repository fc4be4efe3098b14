"""`VolumeWriter` and `VolumeReader` on a folder: what is written is what is read, by ours and by torch's own."""

from __future__ import annotations

import random
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from checkpoint_support import save as save_run
from checkpoint_support import small_state
from dcp_states import REFUSED, assert_same, load, read, save, state, tensors, write
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from framework.checkpoint import CheckpointStore, VolumeReader, VolumeWriter, per_rank
from framework.checkpoint.files import PIECE_BYTES
from framework.errors import CheckpointError


def test_what_is_saved_is_loaded_bit_for_bit(tmp_path: Path) -> None:
    write(tmp_path / "step_7", 7)
    assert_same(read(tmp_path / "step_7"), state(7))


def test_a_save_is_read_by_torch_itself(tmp_path: Path) -> None:
    write(tmp_path, 7, file_bytes=10_000)
    assert_same(load(tensors(1), dcp.FileSystemReader(tmp_path)), tensors(7))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is unavailable")
        dcp_to_torch_save(tmp_path, tmp_path / "all.pt")
    whole = torch.load(tmp_path / "all.pt", weights_only=False)
    assert_same(whole["model"], tensors(7)["model"])


def test_a_save_of_torch_itself_is_read(tmp_path: Path) -> None:
    save(state(7), dcp.FileSystemWriter(tmp_path, thread_count=2))
    assert_same(read(tmp_path), state(7))


def test_files_are_split_and_long_tensors_cut_by_rows(tmp_path: Path) -> None:
    write(tmp_path, 7, file_bytes=10_000)
    files = sorted(tmp_path.glob("*.distcp"))
    assert len(files) > 8
    assert max(file.stat().st_size for file in files) < 13_000  # 10,000 and what torch puts around
    assert_same(read(tmp_path), state(7))


def test_tensors_that_share_memory_are_stored_once(tmp_path: Path) -> None:
    write(tmp_path / "tied", 7)
    apart = state(7)
    apart["model"]["tied"] = apart["model"]["weight"].clone()
    save(apart, VolumeWriter(tmp_path / "apart"))
    sizes = [sum(file.stat().st_size for file in (tmp_path / name).glob("*.distcp")) for name in ("apart", "tied")]
    assert sizes[0] - sizes[1] > 300 * 40 * 4


def test_the_states_of_random_number_generators_are_restored(tmp_path: Path) -> None:
    def drawn() -> tuple[Any, ...]:
        return random.random(), np.random.rand(), torch.rand(1).item()

    def rng() -> dict[str, Any]:
        return {
            "python": per_rank(random.getstate()),
            "numpy": per_rank(np.random.get_state()),
            "torch": per_rank(torch.get_rng_state()),
            "generator": per_rank(np.random.default_rng(3).bit_generator.state),
        }

    save(rng(), VolumeWriter(tmp_path))
    expected = drawn()
    loaded = load(rng(), VolumeReader(tmp_path))
    random.setstate(loaded["python"].value)
    np.random.set_state(loaded["numpy"].value)
    torch.set_rng_state(loaded["torch"].value)
    assert drawn() == expected
    assert loaded["generator"].value == np.random.default_rng(3).bit_generator.state


def test_what_could_not_be_loaded_again_is_not_saved(tmp_path: Path) -> None:
    with pytest.raises(REFUSED, match=r"'place\.x' could be saved, but is not loaded without running code.*PosixPath"):
        save({**tensors(1), "place": {"x": tmp_path}}, VolumeWriter(tmp_path / "to"))
    assert not list((tmp_path / "to").glob("*"))


def test_saving_over_a_checkpoint_keeps_the_old_one_until_the_new_one_is_whole(tmp_path: Path) -> None:
    write(tmp_path, 3)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(REFUSED):
        save({**state(4), "bad": tmp_path}, VolumeWriter(tmp_path))
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    write(tmp_path, 5)
    assert_same(read(tmp_path), state(5))
    assert not {path.name for path in tmp_path.iterdir()} & (before.keys() - {".metadata"})


def test_saving_over_a_checkpoint_of_torch_itself_replaces_it(tmp_path: Path) -> None:
    save(state(3), dcp.FileSystemWriter(tmp_path))
    write(tmp_path, 5)
    assert_same(read(tmp_path), state(5))
    assert not (tmp_path / "__0_0.distcp").exists()


def test_another_dtype_is_refused_unless_it_is_meant(tmp_path: Path) -> None:
    write(tmp_path, 7)
    target = {"model": {"weight": torch.ones(300, 40, dtype=torch.float64)}}
    with pytest.raises(REFUSED, match=r"'model.weight' is torch.float32 there and torch.float64 here"):
        load(target, VolumeReader(tmp_path))
    assert_same(target["model"]["weight"], torch.ones(300, 40, dtype=torch.float64))
    load(target, VolumeReader(tmp_path, cast=True))
    assert_same(target["model"]["weight"], state(7)["model"]["weight"].double())


def test_a_value_is_not_put_where_a_tensor_is(tmp_path: Path) -> None:
    save({"step": 3}, VolumeWriter(tmp_path))
    target = {"step": torch.tensor(5)}
    with pytest.raises(REFUSED, match="'step' is a Python value there and a tensor here"):
        load(target, VolumeReader(tmp_path))
    assert_same(target["step"], torch.tensor(5))


def test_some_keys_are_loaded_alone_and_missing_ones_named(tmp_path: Path) -> None:
    write(tmp_path, 7)
    target = {"optimizer": {"exp_avg": torch.zeros(300, 40)}}
    assert_same(load(target, VolumeReader(tmp_path))["optimizer"]["exp_avg"], state(7)["optimizer"]["exp_avg"])
    with pytest.raises(REFUSED, match=r"Missing key.*optimizer\.other"):
        load({"optimizer": {"other": torch.zeros(1)}}, VolumeReader(tmp_path))


def test_tensors_over_several_checksums_are_proven_in_all_of_them(tmp_path: Path) -> None:
    big = torch.arange(PIECE_BYTES // 4 + 5000, dtype=torch.float32)
    save({"big": big}, VolumeWriter(tmp_path))
    assert_same(load({"big": torch.zeros_like(big)}, VolumeReader(tmp_path))["big"], big)
    (file,) = tmp_path.glob("*.distcp")
    data = bytearray(file.read_bytes())
    data[PIECE_BYTES + 100] ^= 1
    file.write_bytes(data)
    with pytest.raises(REFUSED, match=rf"{file.name} is damaged between bytes 16,777,216"):
        load({"big": torch.zeros_like(big)}, VolumeReader(tmp_path))


def test_the_place_may_come_from_the_call(tmp_path: Path) -> None:
    writer, reader = VolumeWriter(tmp_path / "nowhere"), VolumeReader(tmp_path / "nowhere")
    for step in (2, 3):
        save(state(step), writer, checkpoint_id=tmp_path / f"step_{step}")
    assert_same(load(state(1), reader, checkpoint_id=tmp_path / "step_2"), state(2))
    assert_same(load(state(1), reader, checkpoint_id=tmp_path / "step_3"), state(3))
    assert not (tmp_path / "nowhere").exists()


def test_no_checkpoint_is_an_error_that_says_so(tmp_path: Path) -> None:
    for _ in range(2):
        with pytest.raises(REFUSED, match=r"holds no checkpoint: there is no \.metadata") as caught:
            read(tmp_path)
    assert isinstance(caught.value.failures[0][0], CheckpointError)
    with pytest.raises(CheckpointError, match="holds no checkpoint"):
        VolumeReader(tmp_path).read_metadata()


def test_numbers_out_of_range_are_refused_at_once(tmp_path: Path) -> None:
    for wrong in ({"keep_local": -1}, {"threads": 0}, {"file_bytes": 0}, {"retry_seconds": -1}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            VolumeWriter(tmp_path, **wrong)
    with pytest.raises(ValueError, match="threads=0"):
        VolumeReader(tmp_path, threads=0)


def test_a_checkpoint_of_a_run_is_read(tmp_path: Path) -> None:

    store = CheckpointStore(tmp_path)
    result = save_run(store, 5)
    weight = {"model": {"fc.weight": torch.zeros(40, 30)}}
    load(weight, VolumeReader(result.path))
    assert_same(weight["model"]["fc.weight"], small_state(5).tensors["model"]["fc.weight"])


def test_a_tensor_whose_values_share_memory_is_refused_with_the_others_untouched(tmp_path: Path) -> None:
    save({"a": torch.ones(2), "e": torch.ones(3, 7)}, VolumeWriter(tmp_path))
    target = {"a": torch.zeros(2), "e": torch.zeros(3, 1).expand(3, 7)}
    with pytest.raises(REFUSED, match="'e' share memory"):
        load(target, VolumeReader(tmp_path))
    assert_same(target["a"], torch.zeros(2))
