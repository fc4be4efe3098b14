"""Damage is noticed before anything is changed, named, set aside, and the checkpoint before it is used."""

from __future__ import annotations

import io
import json
import os
import pickle
import shutil
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_support import assert_holds, blank, leaves, make_reader, save, small_state, snapshot

from framework.checkpoint import CheckpointStore
from framework.checkpoint.files import DamagedError, sums_of
from framework.checkpoint.manifest import METADATA, seal, unseal
from framework.checkpoint.record import read_record
from framework.checkpoint.verify import check_structure
from framework.errors import CheckpointError

FILES = [METADATA, "manifest", "__0_0", "rank_0", "shared"]


def file_of(folder: Path, kind: str) -> Path:
    (path,) = [folder / name for name in os.listdir(folder) if name == kind or name.split(".")[0] == kind]
    return path


def truncate(path: Path, other: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def empty(path: Path, other: Path) -> None:
    os.truncate(path, 0)


def flip(path: Path, other: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) * 2 // 3] ^= 4
    path.write_bytes(data)


def zero(path: Path, other: Path) -> None:
    path.write_bytes(bytes(path.stat().st_size))


def delete(path: Path, other: Path) -> None:
    path.unlink()


def swap(path: Path, other: Path) -> None:
    shutil.copyfile(other, path)


def link(path: Path, other: Path) -> None:
    elsewhere = path.parent.parent.parent / "elsewhere"
    os.rename(path, elsewhere)
    path.symlink_to(elsewhere)


def folder_instead(path: Path, other: Path) -> None:
    path.unlink()
    path.mkdir()


def zero_page(path: Path, other: Path) -> None:
    data = bytearray(path.read_bytes())
    begin = len(data) // 3
    data[begin : begin + 4096] = bytes(len(data[begin : begin + 4096]))
    path.write_bytes(data)


def grow(path: Path, other: Path) -> None:
    with path.open("ab") as file:
        file.write(b"\0")


def pipe_instead(path: Path, other: Path) -> None:
    path.unlink()
    os.mkfifo(path)


DAMAGE: list[Callable[[Path, Path], None]] = [
    truncate, empty, flip, zero, zero_page, grow, delete, swap, link, folder_instead, pipe_instead,
]  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGE, ids=lambda d: d.__name__)
@pytest.mark.parametrize("kind", FILES)
def test_damage_to_any_file_is_noticed_named_and_set_aside(
    store: CheckpointStore, kind: str, damage: Callable[[Path, Path], None]
) -> None:
    save(store, 1)
    save(store, 2)
    path = file_of(store.folder(2), kind)
    damage(path, file_of(store.folder(1), kind))
    if damage is delete and kind == METADATA:  # then it was never published
        assert_holds(store, 1)
        assert not (store.path / "damaged").exists()
        return
    before = snapshot(store.folder(2))
    reader = make_reader(store)
    found = reader.newest_valid()
    assert found is not None and found.step == 1
    (rejected,) = reader.rejected
    assert rejected.moved_to == store.path / "damaged" / store.folder(2).name
    assert snapshot(rejected.moved_to) == before and not store.folder(2).exists()
    named = "manifest" if kind == METADATA and damage is swap else kind  # the other's seal names the other's manifest
    assert named in rejected.reason
    reason = (store.path / "damaged" / f"{store.folder(2).name}.reason.txt").read_text()
    assert rejected.reason in reason and str(store.folder(2)) in reason
    assert_holds(store, 1)


def test_every_bit_of_the_metadata_is_covered_its_seal_too(store: CheckpointStore) -> None:
    save(store, 1)
    path = store.folder(1) / METADATA
    whole = path.read_bytes()
    body = whole.rindex(b"{") - 40
    for at in [*range(0, body, 5), *range(body, len(whole))]:
        data = bytearray(whole)
        data[at] ^= 1 << (at % 8)
        path.write_bytes(data)
        with pytest.raises(DamagedError):
            check_structure(store.folder(1), 1)
    path.write_bytes(whole)
    check_structure(store.folder(1), 1)


def test_a_folder_renamed_to_another_step_is_noticed(store: CheckpointStore) -> None:
    save(store, 1)
    save(store, 2)
    os.rename(store.folder(2), store.folder(7))
    reader = make_reader(store)
    found = reader.newest_valid()
    assert found is not None and found.step == 1
    assert "holds step 2, but its folder is named for step 7" in reader.rejected[0].reason


def test_live_tensors_stay_untouched_when_no_checkpoint_is_whole_and_nothing_on_disk_changes(
    store: CheckpointStore,
) -> None:
    for step in (1, 2, 3):
        save(store, step)
    flip(file_of(store.folder(3), "__0_0"), Path())
    truncate(file_of(store.folder(2), "shared"), Path())
    delete(file_of(store.folder(1), "manifest"), Path())
    before = snapshot(store.path)
    with pytest.raises(CheckpointError) as raised:
        make_reader(store).newest_valid()
    message = str(raised.value)
    assert "None of 3 checkpoints" in message
    for step, cause in ((3, "checksum differs"), (2, "bytes instead of"), (1, "is missing")):
        (line,) = [line for line in message.splitlines() if str(store.folder(step)) in line]
        assert cause in line
    assert snapshot(store.path) == before


def test_a_checkpoint_damaged_after_it_was_found_is_an_error_not_a_wrong_state(store: CheckpointStore) -> None:
    save(store, 1)
    reader = make_reader(store)
    found = reader.newest_valid()
    assert found is not None
    flip(file_of(store.folder(1), "shared"), Path())
    with pytest.raises(CheckpointError, match="has changed since it was verified"):
        reader.read_shared(found)
    delete(file_of(store.folder(1), "__0_0"), Path())
    with pytest.raises(CheckpointError, match="is missing"):
        reader.load(found, blank(small_state(1).tensors))
    with pytest.raises(CheckpointError, match="is damaged"):
        reader.open(found)


def test_setting_aside_the_same_step_twice_keeps_both(store: CheckpointStore) -> None:
    save(store, 1)
    for attempt in (2, 3):
        save(store, 2, attempt=attempt)
        flip(file_of(store.folder(2), "__0_0"), Path())
        make_reader(store).newest_valid()
    name = store.folder(2).name
    assert sorted(os.listdir(store.path / "damaged")) == [
        name, f"{name}-2", f"{name}-2.reason.txt", f"{name}.reason.txt",
    ]  # fmt: skip


class Attack:
    """A pickle that makes a file when it is loaded."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return (os.mkdir, (str(self.marker),))


def reseal(
    folder: Path, change: Callable[[dict[str, Any]], None] = lambda manifest: None, pickled: bytes = b""
) -> None:
    """Changes a manifest and makes all digests right again, as an attacker would."""
    original, found = unseal((folder / METADATA).read_bytes())
    manifest = json.loads((folder / found.manifest).read_bytes())
    for name, record in manifest["files"].items():
        if (folder / name).exists():
            data = (folder / name).read_bytes()
            record.update(size=len(data), crc32=list(sums_of(data)))
    change(manifest)
    data = json.dumps(manifest).encode()
    (folder / found.manifest).write_bytes(data)
    (folder / METADATA).write_bytes(seal(pickled or original, found.manifest, data))


def test_code_in_the_metadata_does_not_run(store: CheckpointStore, tmp_path: Path) -> None:
    save(store, 1)
    save(store, 2)
    marker = tmp_path / "code-ran"
    for attack in (pickle.dumps(Attack(marker)), pickle.dumps({"a": [Attack(marker)]}, protocol=0)):
        with pytest.raises(DamagedError, match=r"asks for posix\.mkdir"):
            read_record(attack, {})
    reseal(store.folder(2), pickled=pickle.dumps(Attack(marker)))
    reader = make_reader(store)
    found = reader.newest_valid()
    assert found is not None and found.step == 1
    assert "posix.mkdir" in reader.rejected[0].reason
    assert not marker.exists()


@pytest.mark.parametrize("name", ["builtins.eval", "builtins.getattr", "torch.load", "torch.hub.load", "os.system"])
def test_the_metadata_may_name_nothing_but_its_own_classes(name: str) -> None:
    module, _, attribute = name.rpartition(".")
    program = f"c{module}\n{attribute}\n.".encode()
    with pytest.raises(DamagedError, match="asks for"):
        read_record(program, {})


def test_code_in_a_shard_does_not_run(store: CheckpointStore, tmp_path: Path) -> None:
    save(store, 1)
    marker = tmp_path / "code-ran"
    buffer = io.BytesIO()
    torch.save(Attack(marker), buffer, _use_new_zipfile_serialization=False)  # bytes that follow are not looked at
    attack = buffer.getvalue()
    torch.load(io.BytesIO(attack + bytes(500)), weights_only=False)
    marker.rmdir()  # the attack works where loading may run code
    pickled, _ = unseal((store.folder(1) / METADATA).read_bytes())
    shard = file_of(store.folder(1), "__0_0")
    data = bytearray(shard.read_bytes())
    record = read_record(pickled, check_structure(store.folder(1), 1)[0].files)
    for place in record.storage_data.values():
        data[place.offset : place.offset + place.length] = attack + bytes(place.length - len(attack))
    shard.write_bytes(data)
    reseal(store.folder(1))
    reader = make_reader(store)
    found = reader.newest_valid()
    assert found is not None
    with pytest.raises(CheckpointError, match="holds no tensor"):
        reader.load(found, blank(small_state(1).tensors))
    assert not marker.exists()


@pytest.mark.parametrize("name", ["../outside", "/etc/passwd", "a/b", "..", ".metadata", "", "a\0b", "a\\b"])
def test_a_manifest_cannot_name_files_outside_of_its_folder(store: CheckpointStore, name: str) -> None:
    save(store, 1)
    save(store, 2)
    (store.path / "outside").write_bytes(b"secret")

    def add(manifest: dict[str, Any]) -> None:
        manifest["files"][name] = {"size": 6, "crc32": [zlib.crc32(b"secret")]}

    reseal(store.folder(2), add)
    reader = make_reader(store)
    found = reader.newest_valid()
    assert found is not None and found.step == 1
    assert "outside of its folder" in reader.rejected[0].reason


def test_metadata_cannot_name_bytes_outside_of_the_files(store: CheckpointStore) -> None:
    save(store, 1)
    manifest, record = check_structure(store.folder(1), 1)
    place = next(iter(record.storage_data.values()))
    for name, value, part in (
        ("relative_path", "../../outside", "which the manifest does not name"),
        ("offset", 1 << 40, "lies outside of"),
        ("offset", -1, "lies outside of"),
        ("length", -5, "lies outside of"),
        ("length", 1 << 40, "lies outside of"),
    ):
        before = getattr(place, name)
        setattr(place, name, value)
        with pytest.raises(DamagedError, match=part):
            read_record(pickle.dumps(record), manifest.files)
        setattr(place, name, before)
    del record.storage_data[next(iter(record.storage_data))]
    with pytest.raises(DamagedError, match="does not say where"):
        read_record(pickle.dumps(record), manifest.files)


def test_pickled_python_objects_among_the_tensors_are_refused(store: CheckpointStore) -> None:
    save(store, 1)
    manifest, record = check_structure(store.folder(1), 1)
    record.state_dict_metadata["lr"] = torch.distributed.checkpoint.metadata.BytesStorageMetadata()
    with pytest.raises(DamagedError, match="'lr' is a pickled Python object"):
        read_record(pickle.dumps(record), manifest.files)


def test_a_later_format_is_an_error_and_is_not_set_aside(store: CheckpointStore) -> None:
    save(store, 1)
    save(store, 2)
    reseal(store.folder(2), lambda manifest: manifest.update(format=2))
    before = snapshot(store.path)
    with pytest.raises(
        CheckpointError, match=r"step_0000000002: The checkpoint has format 2; this version reads up to 1"
    ):
        make_reader(store).newest_valid()
    assert snapshot(store.path) == before


def test_unknown_fields_of_a_manifest_are_kept(store: CheckpointStore) -> None:
    save(store, 1)
    reseal(store.folder(1), lambda manifest: manifest.update(from_the_future={"a": [1]}))
    (found,) = store.list()
    assert found.manifest.unknown == {"from_the_future": {"a": [1]}}
    assert type(found.manifest).from_bytes(found.manifest.to_bytes()) == found.manifest


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("step", "1"),
        ("step", True),
        ("files", []),
        ("rank_files", {"x": "a"}),
        ("shared_file", "gone"),
        ("position", None),
    ],
)
def test_a_manifest_with_a_wrong_field_is_damaged(store: CheckpointStore, field: str, value: Any) -> None:
    save(store, 1)
    reseal(store.folder(1), lambda manifest: manifest.update({field: value}))
    (found,) = store.list()
    assert found.damage is not None and (field in found.damage or "rank" in found.damage or "gone" in found.damage)
    with pytest.raises(CheckpointError, match="is damaged"):
        _ = found.manifest


def test_verifying_changes_no_tensor(store: CheckpointStore) -> None:
    save(store, 1)
    live = blank(small_state(1).tensors)
    make_reader(store).newest_valid()
    assert not any(tensor.any() for tensor in leaves(live))
