"""Files as samples by index: decoding, labels, what is refused, and what a checkpoint keeps of the list."""

from __future__ import annotations

import io
import os
import pickle
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from files_support import as_number, fill, names, write
from PIL import Image
from support.faultfs import FaultFS
from support.storage import S3

from framework.data import ImageFolder, VolumeDataset
from framework.data.files import dataset as dataset_module
from framework.errors import ConfigError, DataError, StateMismatchError
from framework.volume import open_volume


def picture(path: Path, shade: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (12, 8), (shade, shade, shade)).save(path)


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    root = tmp_path / "photos"
    picture(root / "dog" / "b.png", 10)
    picture(root / "dog" / "a.PNG", 20)
    picture(root / "Cat" / "é \n1.png", 40)
    write(root / "dog" / "notes.txt")
    (root / "empty").mkdir()
    return root


def numbers(root: Path, **options: Any) -> VolumeDataset:
    return VolumeDataset(root, **{"decode": as_number, "label": None, "list_timeout": "1s"} | options)


def test_images_come_decoded_with_the_number_of_their_folder(photos: Path) -> None:
    dataset, folder = VolumeDataset(photos), ImageFolder(photos)
    assert dataset.classes == folder.classes == ["Cat", "dog", "empty"]
    assert names(dataset) == [folder.sample_key(index) for index in range(3)]
    for (image, label), (same, number) in zip(
        map(dataset.__getitem__, range(3)), map(folder.__getitem__, range(3)), strict=True
    ):
        assert torch.equal(image, same) and label == number
        assert (image.dtype, tuple(image.shape)) == (torch.uint8, (3, 8, 12))
    changed = VolumeDataset(str(photos), transform=lambda image: image.float().mean().item(), label=None)
    assert [changed[index] for index in range(3)] == [40.0, 20.0, 10.0] and changed[-1] == 10.0
    with pytest.raises(IndexError, match=f"no file 3 among the 3 of {photos}"):
        changed[3]


@pytest.mark.parametrize(
    ("decode", "first"), [(None, b"file 000;" * 8), (as_number, torch.tensor(0)), (len, 72), ("path", "c0/000.bin")]
)
def test_a_file_is_decoded_as_asked(tmp_path: Path, decode: Any, first: Any) -> None:
    fill(tmp_path, 3)
    sample = numbers(tmp_path, decode=decode)[0]
    assert sample == (str(tmp_path / first) if decode == "path" else first)


def test_a_label_may_come_from_the_name(tmp_path: Path) -> None:
    fill(tmp_path, 4, classes=2)
    dataset = numbers(tmp_path, label=lambda name: name.upper(), extensions="bin")
    assert dataset[3] == (torch.tensor(3), "C1/003.BIN")
    assert dataset.classes == []


def test_labels_of_folders_where_there_are_none_are_refused(tmp_path: Path) -> None:
    write(tmp_path / "a.bin")
    dataset = VolumeDataset(tmp_path, decode=None)
    with pytest.raises(ConfigError, match=rf"{tmp_path}/a.bin lies in no class folder.*Use label=None"):
        dataset[0]


def test_a_set_that_lacks_classes_keeps_the_numbers_of_the_other(tmp_path: Path) -> None:
    fill(tmp_path / "train", 4, classes=4)
    write(tmp_path / "val" / "c2" / "x", b"file 007;" * 8)
    train = VolumeDataset(tmp_path / "train", decode=as_number)
    val = VolumeDataset(tmp_path / "val", decode=as_number, classes=train.classes)
    assert val[0] == (torch.tensor(7), 2) and val.classes == train.classes
    write(tmp_path / "val" / "c9" / "x")
    with pytest.raises(DataError, match=r"none of the 4 classes given: \['c9'\] \(1\)\. Add them"):
        VolumeDataset(tmp_path / "val", decode=as_number, classes=train.classes)


def test_a_damaged_picture_is_named_with_its_full_path(photos: Path) -> None:
    write(photos / "Cat" / "broken.jpg", b"\xff\xd8\xff\xe0 no picture")
    with pytest.raises(DataError, match=rf"{photos}/Cat/broken.jpg \(15 bytes\) is damaged or no image"):
        VolumeDataset(photos)[0]


@pytest.mark.parametrize("has_cache", [False, True])
def test_a_file_that_changed_since_it_was_listed_is_named(tmp_path: Path, has_cache: bool) -> None:
    fill(tmp_path / "data", 3)
    dataset = numbers(tmp_path / "data", cache=tmp_path / "cache" if has_cache else None)
    assert dataset[0] == 0
    for index, data in ((1, b"shorter"), (2, b"file 002;" * 8)):
        path = tmp_path / "data" / names(dataset)[index]
        path.write_bytes(data)
        os.utime(path, ns=(1, 1))
        with pytest.raises(DataError, match=str(path)):
            dataset[index]


def test_a_file_that_was_written_anew_is_not_taken_from_the_cache(tmp_path: Path) -> None:
    fill(tmp_path / "data", 3)
    assert [numbers(tmp_path / "data", cache=tmp_path / "cache")[index] for index in range(3)] == [0, 1, 2]
    path = write(tmp_path / "data" / "c0" / "001.bin", b"file 007;" * 8)
    os.utime(path, ns=(1, 1))
    assert [numbers(tmp_path / "data", cache=tmp_path / "cache")[index] for index in range(3)] == [0, 7, 2]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"decode": "imgae"}, "decode='imgae' is none of 'image', 'path', no function.*Did you mean 'image'"),
        ({"label": "folders"}, "label='folders' is none of 'folder'.*Did you mean 'folder'"),
        ({"manifest": "thawed"}, "manifest='thawed' is neither 'checked' nor 'frozen'"),
        ({"list_timeout": "soon"}, "list_timeout='soon' is not a duration"),
        ({"extensions": []}, r"extensions=\[\] must be endings"),
        ({"classes": ["a"]}, "classes=… names class folders"),
        ({"cache": {"rot": "/x"}}, "cache.rot: there is no such option. Did you mean 'root'"),
    ],
)
def test_arguments_that_make_no_sense_are_refused(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    fill(tmp_path, 1)
    with pytest.raises(ConfigError, match=message):
        numbers(tmp_path, **options)


def test_endings_need_no_dot_and_no_case(tmp_path: Path) -> None:
    for name in ("a.PNG", "b.xpng", "c_seg.png", "png"):
        write(tmp_path / name)
    assert names(numbers(tmp_path, extensions="png")) == ["a.PNG", "c_seg.png"]
    assert names(numbers(tmp_path, extensions=["_SEG.png", "gpn"])) == ["c_seg.png"]


def test_the_fingerprint_is_that_of_names_sizes_and_classes(tmp_path: Path) -> None:
    fill(tmp_path / "one", 4, classes=2)
    fill(tmp_path / "two", 4, classes=2)
    one, two = (VolumeDataset(tmp_path / name, decode=None) for name in ("one", "two"))
    assert one.fingerprint == two.fingerprint != numbers(tmp_path / "one").fingerprint
    (tmp_path / "two" / "c0b").mkdir()  # the label of c1 is another one now
    assert VolumeDataset(tmp_path / "two", decode=None).fingerprint != one.fingerprint
    assert VolumeDataset(tmp_path / "two", decode=None).manifest.fingerprint == one.manifest.fingerprint


def through_a_checkpoint(state: dict[str, Any]) -> dict[str, Any]:
    stream = io.BytesIO()
    torch.save(state, stream)
    stream.seek(0)
    loaded: dict[str, Any] = torch.load(stream, weights_only=True)
    return loaded


def test_a_resume_over_other_files_is_refused_with_what_was_added_and_removed(tmp_path: Path) -> None:
    fill(tmp_path, 6, classes=2)
    saved = through_a_checkpoint(VolumeDataset(tmp_path, decode=None).data_state())
    VolumeDataset(tmp_path, decode=None).check_data_state(saved)
    (tmp_path / "c0" / "002.bin").unlink()
    write(tmp_path / "c1" / "new 1.bin")
    write(tmp_path / "c1" / "new 2.bin")
    write(tmp_path / "c1" / "003.bin", b"longer" * 99)
    (tmp_path / "c2").mkdir()
    expected = (
        r"changed since the checkpoint: 7 files now, 6 then; 2 added \('c1/new 1.bin', 'c1/new 2.bin'\), 1 removed "
        r"\('c0/002.bin'\), 1 changed in size \('c1/003.bin'\); classes \['c0', 'c1', 'c2'\] \(3\) now, \['c0', 'c1'\] "
        r"\(2\) then\..*go on with the old list by manifest=frozen.*run\.allow=\[data\]"
    )
    with pytest.raises(StateMismatchError, match=expected):
        VolumeDataset(tmp_path, decode=None).check_data_state(saved)


def test_a_frozen_list_is_that_of_the_checkpoint(tmp_path: Path) -> None:
    fill(tmp_path, 6, classes=2)
    before = numbers(tmp_path, label="folder")
    saved = through_a_checkpoint(before.data_state())
    write(tmp_path / "a" / "new.bin", b"file 999;" * 8)
    dataset = numbers(tmp_path, label="folder", manifest="frozen")
    assert len(dataset) == 7 and dataset.classes == ["a", "c0", "c1"]
    dataset.check_data_state(saved)
    assert names(dataset) == names(before) and dataset.classes == ["c0", "c1"]
    assert [dataset[index] for index in range(6)] == [before[index] for index in range(6)]
    assert dataset.fingerprint == before.fingerprint and dataset.data_state() == saved
    assert sorted(map(os.path.basename, dataset)) == sorted(map(os.path.basename, before))
    os.unlink(tmp_path / "c0" / "002.bin")
    with pytest.raises(DataError, match=r"c0/002\.bin could not be read"):
        dataset[1]


def test_a_list_too_long_for_a_checkpoint_is_compared_by_its_fingerprint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dataset_module, "MOST_STATE", 10)
    fill(tmp_path, 3)
    saved = numbers(tmp_path).data_state()
    assert saved["manifest"] is None
    numbers(tmp_path).check_data_state(saved)
    write(tmp_path / "new")
    expected = r"changed since the checkpoint: 4 files now, 3 then\..*the list was too long to be kept"
    for manifest in ("checked", "frozen"):
        with pytest.raises(StateMismatchError, match=expected):
            numbers(tmp_path, manifest=manifest).check_data_state(saved)


def test_what_another_kind_of_data_left_in_a_checkpoint_is_refused(tmp_path: Path) -> None:
    fill(tmp_path, 3)
    with pytest.raises(
        StateMismatchError, match=r"made over other data than the files of .*keeps fingerprint, shards of"
    ):
        numbers(tmp_path).check_data_state({"fingerprint": "x", "shards": 7})
    saved = numbers(tmp_path).data_state() | {"fingerprint": "x", "manifest": b"damaged"}
    with pytest.raises(DataError, match="The list of files in the checkpoint is damaged"):
        numbers(tmp_path).check_data_state(saved)


def test_a_dataset_travels_as_a_pickle_and_starts_anew_there(tmp_path: Path) -> None:
    fill(tmp_path / "data", 3)
    dataset = numbers(tmp_path / "data", cache={"root": tmp_path / "cache", "min_free": 0})
    assert dataset[1] == 1 and next(iter(dataset)).startswith(str(tmp_path / "cache"))
    again = pickle.loads(pickle.dumps(dataset))
    assert [again[index].item() for index in range(3)] == [0, 1, 2]
    stats = again.take_stats()
    assert stats.cache_hits + stats.cache_misses == 3  # nothing of what the other one counted
    assert names(again) == names(dataset) and again.fingerprint == dataset.fingerprint


def test_a_cache_inside_the_data_is_refused(tmp_path: Path) -> None:
    fill(tmp_path, 3)
    with pytest.raises(ConfigError, match=f"the cache {tmp_path}/c/cache lies inside the data at {tmp_path}"):
        numbers(tmp_path, cache=tmp_path / "c" / "cache")
    assert not (tmp_path / "c").exists()


def test_objects_of_a_store_are_samples_too(s3: S3, tmp_path: Path) -> None:
    contents = fill(tmp_path / "local", 12, classes=3)
    for name, data in contents.items():
        open_volume(s3.url).put(name, data)
    local = VolumeDataset(tmp_path / "local", decode=as_number)
    remote = VolumeDataset(s3.url, decode=as_number, cache={"root": tmp_path / "cache", "min_free": 0})
    assert [remote[index] for index in range(12)] == [local[index] for index in range(12)]
    assert (remote.fingerprint, remote.classes, names(remote)) == (local.fingerprint, local.classes, names(local))
    stats = remote.take_stats()
    assert (stats.cache_hits, stats.cache_misses, stats.bytes_fetched) == (0, 12, 12 * 72)
    assert [remote[index][0] for index in range(12)] == [local[index][0] for index in range(12)]
    assert remote.take_stats().cache_hits == 12
    log = len(s3.proxy.log)
    again = VolumeDataset(s3.url, decode=as_number, cache={"root": tmp_path / "cache", "min_free": 0})
    assert again[5] == local[5]
    assert not [
        path for method, path in s3.proxy.log[log:] if method == "GET" and ".bin" in path
    ]  # cached by a job before


def test_a_file_behind_a_link_is_read(tmp_path: Path) -> None:
    write(tmp_path / "elsewhere" / "a", b"file 005;" * 8)
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "c0").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "data" / "b").symlink_to(tmp_path / "elsewhere" / "a")
    for cache in (None, tmp_path / "cache"):
        dataset = numbers(tmp_path / "data", cache=cache)
        assert [(name, dataset[index].item()) for index, name in enumerate(names(dataset))] == [("b", 5), ("c0/a", 5)]


def test_files_of_a_batch_are_fetched_beside_each_other_for_torchs_own_loader(faultfs: FaultFS, tmp_path: Path) -> None:
    fill(faultfs.backing, 8)
    dataset = numbers(faultfs.path, cache={"root": tmp_path / "cache", "min_free": 0})
    faultfs.stall("open", match="*003.bin")
    batches: list[list[int]] = []
    loader = torch.utils.data.DataLoader(dataset, batch_size=8)
    thread = threading.Thread(target=lambda: batches.extend(batch.tolist() for batch in loader))
    thread.start()
    deadline = time.monotonic() + 60
    while len({path for _, path in faultfs.calls("open") if path.endswith(".bin")}) < 8:  # while one does not answer
        assert time.monotonic() < deadline
        time.sleep(0.01)
    faultfs.heal()
    thread.join(60)
    assert batches == [list(range(8))]


@pytest.mark.parametrize("workers", [0, 2])
def test_torchs_own_loader_takes_it_by_index(tmp_path: Path, workers: int) -> None:
    fill(tmp_path, 10, classes=2)
    dataset = VolumeDataset(tmp_path, decode=as_number)
    loader = torch.utils.data.DataLoader(dataset, batch_size=4, shuffle=True, num_workers=workers)
    for _ in range(2):
        pairs = [pair for batch in loader for pair in zip(*(part.tolist() for part in batch), strict=True)]
        assert sorted(pairs) == [(number, number % 2) for number in range(10)]
