"""Records that somebody made up: sealed rightly, and still nothing in them gets further than a reason."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from checkpoint_support import make_reader, make_writer, small_state

from framework.checkpoint import CheckpointStore, SaveHeader
from framework.checkpoint.commands.places import open_run
from framework.checkpoint.compat import StorageInfo
from framework.checkpoint.dcp.proven import prove
from framework.checkpoint.manifest import METADATA, seal, unseal
from framework.errors import CheckpointError
from framework.volume import open_volume

DEEP = b"[" * 100_000


def sealed_anew(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Gives a checkpoint another manifest, with the right checksums; `change` may return the bytes instead."""
    pickled, before = unseal((folder / METADATA).read_bytes())
    manifest = json.loads((folder / before.manifest).read_bytes())
    data = change(manifest)
    if not isinstance(data, bytes):
        data = json.dumps(manifest).encode()
    (folder / before.manifest).write_bytes(data)
    (folder / METADATA).write_bytes(seal(pickled, before.manifest, data))


def two_saves(store: CheckpointStore) -> Path:
    writer = make_writer(store)
    for step in (1, 2):
        writer.start(small_state(step), SaveHeader(step))
        assert writer.wait(30)[0].committed
    writer.close()
    return store.folder(2)


CHANGES: dict[str, Callable[[dict[str, Any]], object]] = {
    "nested too deeply": lambda _: b'{"format": 1, "x": ' + DEEP,
    "a name that no disk can have": lambda one: one["files"].update({"a\ud800": {"size": 0, "crc32": []}}),
    "a rank with 5,000 digits": lambda one: one["rank_files"].update({"9" * 5000: one["rank_files"]["0"]}),
    "a time that is no number": lambda one: one.update(created=float("nan")),
    "a time that no clock shows": lambda one: one.update(created=10**400),
    "a metric that is no number of any machine": lambda one: one["metrics"].update(top1=10**400),
    "a position beyond any data": lambda one: one.update(position=10**400),
    "a negative number of steps": lambda one: one.update(skipped=-1),
    "an endless training": lambda one: one.update(elapsed_seconds=float("inf")),
}


@pytest.mark.parametrize("what", CHANGES)
def test_an_absurd_manifest_is_damage_and_the_one_before_is_used(store: CheckpointStore, what: str) -> None:
    sealed_anew(two_saves(store), CHANGES[what])
    newest = store.list()[0]
    assert newest.damage is not None and "manifest" in newest.damage
    reader = make_reader(store)
    found = reader.newest_valid()
    assert found is not None and found.step == 1
    assert "manifest" in reader.rejected[0].reason


def test_an_absurd_end_of_the_record_is_damage(store: CheckpointStore) -> None:
    (two_saves(store) / METADATA).write_bytes(b"x\n" + DEEP + b"\n")
    assert "no seal" in (store.list()[0].damage or "")


@pytest.mark.parametrize("what", ["nested too deeply", "a name that no disk can have"])
def test_plain_loads_refuse_an_absurd_manifest(store: CheckpointStore, what: str) -> None:
    folder = two_saves(store)
    sealed_anew(folder, CHANGES[what])
    with pytest.raises(CheckpointError, match="Nothing was loaded"):
        prove(open_volume(folder))


def laid_over(folder: Path, kind: str) -> None:
    """A rightly sealed record in which one tensor lies over a part of another, or in the place of one of another kind."""
    pickled, before = unseal((folder / METADATA).read_bytes())
    record = pickle.loads(pickled)
    sizes = {index: record.state_dict_metadata[index.fqn].size for index in record.storage_data}
    one = next(iter(sizes))
    other = next(index for index in sizes if sizes[index] != sizes[one] and record.storage_data[index].length > 1)
    place = record.storage_data[other]
    record.storage_data[one] = place if kind == "whole" else StorageInfo(place.relative_path, place.offset + 1, 1)
    manifest = (folder / before.manifest).read_bytes()
    (folder / METADATA).write_bytes(seal(pickle.dumps(record, protocol=4), before.manifest, manifest))


@pytest.mark.parametrize("kind", ["part", "whole"])
def test_tensors_that_lie_over_each_other_are_damage_and_the_one_before_is_used(
    store: CheckpointStore, kind: str
) -> None:
    folder = two_saves(store)
    laid_over(folder, kind)
    with pytest.raises(CheckpointError, match=r"lie over each other in __0_0.*Nothing was loaded"):
        prove(open_volume(folder))
    reader = make_reader(store)
    found = reader.newest_valid()
    assert found is not None and found.step == 1
    assert "lie over each other in __0_0" in reader.rejected[0].reason


def test_a_config_that_is_nested_too_deeply_is_named(store: CheckpointStore) -> None:
    file = store.path.parent / "config.yaml"
    store.path.mkdir(parents=True, exist_ok=True)
    file.write_bytes(DEEP[:3000])
    with pytest.raises(CheckpointError, match="yaml cannot be read"):
        open_run(str(file.parent)).options()
