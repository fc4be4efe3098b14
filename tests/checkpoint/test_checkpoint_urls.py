"""`diff` and `export` of a checkpoint at a URL: what they need is fetched to a temporary folder, and nothing stays."""

from __future__ import annotations

import os
import shutil
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from checkpoint_support import save, small_state
from remote_support import make_tier, save_remotely
from safetensors.torch import load_file
from support.storage import S3

from framework.checkpoint import CheckpointStore
from framework.checkpoint.__main__ import main
from framework.volume import open_volume

Told = Callable[..., Any]


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of temporary folders."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


@pytest.fixture
def place(store: CheckpointStore, s3: S3) -> str:
    """The URL of a run of two checkpoints, which lie in `store` too."""
    tier = make_tier(s3.url, store)
    for step in (1, 2):
        assert save_remotely(tier, step).committed
    return f"{s3.url}/a-run"


def test_checkpoints_at_urls_are_compared(
    place: str, store: CheckpointStore, s3: S3, temporary: Path, told: Told
) -> None:
    assert told("diff", place, store.folder(2))["equal"]
    s3.proxy.fail(503, count=1, method="GET")
    found = told("diff", f"{place}@1", place, code=1)
    assert found["first"] == f"{place}/step_0000000001" and found["tensors"]["different"] == 4
    assert {row["path"] for row in found["values"]} >= {"shared.step"}
    assert os.listdir(temporary) == []


@pytest.mark.parametrize("name", ["w.safetensors", "w.pt"])
def test_weights_are_exported_from_a_url_and_no_more_than_they_need_is_fetched(
    place: str, s3: S3, temporary: Path, tmp_path: Path, told: Told, name: str
) -> None:
    before = s3.proxy.requests("GET", "*rank_0*"), s3.proxy.requests("GET", "*.distcp*")
    told("export", f"{place}@1", "--to", tmp_path / name)
    assert (s3.proxy.requests("GET", "*rank_0*"), s3.proxy.requests("GET", "*.distcp*")) == (before[0], before[1] + 1)
    loaded = load_file(tmp_path / name) if name.endswith("safetensors") else torch.load(tmp_path / name)
    expected = small_state(1).tensors["model"]
    assert loaded.keys() == expected.keys() and all(torch.equal(loaded[key], expected[key]) for key in expected)
    assert os.listdir(temporary) == []


def test_damage_at_a_url_is_named_and_nothing_is_left(
    place: str, temporary: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    volume = open_volume(f"{place}/step_0000000002")
    (shard,) = (entry.name for entry in volume.list() if entry.name.endswith(".distcp"))
    data = bytearray(volume.read(shard))
    data[1000] ^= 1
    volume.put(shard, bytes(data))
    assert main(["export", place, "--to", str(tmp_path / "w.pt")]) == 1
    text = capsys.readouterr().err
    assert f"{place}/step_0000000002: {shard} is damaged" in text
    assert main(["diff", place, f"{place}@1"]) == 2
    assert "is damaged" in capsys.readouterr().err
    assert not (tmp_path / "w.pt").exists() and os.listdir(temporary) == []


def test_too_little_room_is_said_before_anything_is_fetched(
    place: str, s3: S3, temporary: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    usage = shutil.disk_usage(temporary)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    before = s3.proxy.requests("GET", "*.distcp*")
    assert main(["diff", place, f"{place}@1"]) == 2
    text = capsys.readouterr().err
    assert f"are to be fetched to {temporary}, and 1.0 kB are free" in text and "TMPDIR" in text
    assert s3.proxy.requests("GET", "*.distcp*") == before and os.listdir(temporary) == []


def test_a_stock_checkpoint_at_a_url_is_to_be_copied_first(
    store: CheckpointStore, s3: S3, tmp_path: Path, temporary: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save(store, 1)
    with warnings.catch_warnings(action="ignore"):
        dcp.save({"w": torch.ones(3)}, checkpoint_id=str(tmp_path / "stock"), no_dist=True)
    volume = open_volume(f"{s3.url}/stock")
    for path in sorted((tmp_path / "stock").iterdir(), reverse=True):
        volume.put(path.name, path.read_bytes())
    assert main(["diff", f"{s3.url}/stock", str(store.folder(1))]) == 2
    assert f"copy {s3.url}/stock FOLDER" in capsys.readouterr().err and os.listdir(temporary) == []
