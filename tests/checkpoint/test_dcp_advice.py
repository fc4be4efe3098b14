"""What is used in the wrong way is refused before anything is written, with what to do instead."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from dcp_states import REFUSED

from framework.checkpoint import VolumeReader, VolumeWriter, per_rank
from framework.volume import VolumeError

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


class Own:
    """Which no reader of values builds."""


def test_several_ranks_without_a_process_group_are_told_to_make_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = {"weight": torch.ones(3), "rng": per_rank(torch.ones(1))}
    dcp.save(state, storage_writer=VolumeWriter(tmp_path / "one"))
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(REFUSED, match=r"WORLD_SIZE=2.*Call torch\.distributed\.init_process_group first"):
        dcp.save(state, storage_writer=VolumeWriter(tmp_path / "two"))
    assert not (tmp_path / "two").exists()
    with pytest.raises(REFUSED, match=r"one: WORLD_SIZE=2.*init_process_group first"):
        dcp.load(state, storage_reader=VolumeReader(tmp_path / "one"))
    alone = {"weight": torch.zeros(3)}
    dcp.load(alone, storage_reader=VolumeReader(tmp_path / "one"))
    assert alone["weight"].tolist() == [1, 1, 1]


def test_a_folder_that_is_not_there_and_one_without_a_checkpoint_are_told_apart(tmp_path: Path) -> None:
    with pytest.raises(REFUSED, match=r"nowhere does not exist\."):
        dcp.load({"a": torch.ones(1)}, storage_reader=VolumeReader(tmp_path / "nowhere"))
    with pytest.raises(REFUSED, match=r"holds no checkpoint: there is no \.metadata"):
        dcp.load({"a": torch.ones(1)}, storage_reader=VolumeReader(tmp_path))


@pytest.mark.parametrize("place", ["http://127.0.0.1:9/a", "HTTPS://127.0.0.1/a"])
def test_what_can_only_be_read_is_refused_when_the_writer_is_made(place: str, tmp_path: Path) -> None:
    with pytest.raises(VolumeError, match=r"can only be read\. Save to a path or to s3://"):
        VolumeWriter(place)
    assert not VolumeWriter.validate_checkpoint_id(place)
    assert VolumeReader.validate_checkpoint_id(place)
    with pytest.raises(VolumeError, match="can only be read"):
        VolumeWriter(tmp_path).reset(place)


def test_a_value_that_cannot_be_read_again_is_refused_with_the_advice_before_the_reason(tmp_path: Path) -> None:
    with pytest.raises(REFUSED, match=r"'own' could be saved.* Use numbers.*torch says: it needs \S*Own") as caught:
        dcp.save({"own": Own()}, storage_writer=VolumeWriter(tmp_path / "new"))
    assert "Please use" not in str(caught.value)
    assert not (tmp_path / "new" / ".metadata").exists()
