"""What every volume promises, over a folder, the memory of the process, and a real S3 server."""

from __future__ import annotations

import os
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from framework.volume import Volume, VolumeError, VolumeExists, VolumeMissing, open_volume

PART = 8 << 20


@pytest.fixture(params=["folder", "file", "memory", "s3"])
def volume(request: pytest.FixtureRequest, tmp_path: Path) -> Volume:
    match request.param:
        case "folder":
            return open_volume(tmp_path / "not" / "yet")
        case "file":
            return open_volume(f"file://{tmp_path}/with%20space")
        case "memory":
            return open_volume(f"memory://{uuid.uuid4().hex}")
    return open_volume(request.getfixturevalue("s3").url)


def names(volume: Volume, folder: str = "") -> dict[str, int]:
    return {entry.name: entry.size for entry in volume.list(folder)}


def test_what_was_put_is_read_listed_and_deleted(volume: Volume) -> None:
    assert names(volume) == {} and volume.folders() == [] and volume.size("a") is None
    before = time.time()
    volume.put("a", b"")
    volume.put("deep/er/b", b"12345")
    volume.put("deep/c", b"first")
    volume.put("deep/c", b"other")
    assert names(volume) == {"a": 0, "deep/er/b": 5, "deep/c": 5}
    assert names(volume, "deep") == {"deep/er/b": 5, "deep/c": 5}
    assert names(volume, "dee") == {} and names(volume, "a") == {}
    assert all(before - 5 < entry.modified < time.time() + 5 for entry in volume.list())
    assert (volume.folders(), volume.folders("deep"), volume.folders("nowhere")) == (["deep"], ["er"], [])
    assert (volume.read("a"), volume.read("deep/c")) == (b"", b"other")
    assert (volume.size("deep/c"), volume.size("deep"), volume.size("deep/c/x")) == (5, None, None)
    volume.delete("deep/c")
    volume.delete("deep/c")
    volume.delete("deep")  # a folder is no file of that name
    assert names(volume) == {"a": 0, "deep/er/b": 5}
    volume.delete_folder("deep")
    volume.delete_folder("deep")
    assert names(volume) == {"a": 0}


def test_a_folder_of_a_volume_is_a_volume(volume: Volume) -> None:
    inner = volume.at("runs/one")
    inner.put("x/y", b"1")
    assert volume.read("runs/one/x/y") == b"1" and names(inner) == {"x/y": 1} and inner.folders() == ["x"]
    assert inner.place.endswith("runs/one") and "runs/one/gone" in str(missing(inner, "gone"))
    assert volume.at("").read("runs/one/x/y") == b"1" and inner.at("x").read("y") == b"1"
    assert (volume.path is None) == (inner.path is None)
    inner.delete_folder("")
    assert names(volume) == {}


def missing(volume: Volume, name: str) -> VolumeMissing:
    with pytest.raises(VolumeMissing) as caught:
        volume.read(name)
    return caught.value


def test_a_piece_comes_with_what_the_file_is(volume: Volume) -> None:
    volume.put("deep/a", b"0123456789")
    entry = next(iter(volume.list()))
    for offset, length, data in ((0, 10, b"0123456789"), (3, 4, b"3456")):
        piece, found = volume.piece("deep/a", offset, length)
        assert piece == data
        if found is not None:  # a folder's files have no tag, and whoever needs their time asks for it
            assert (found.name, found.size, found.tag) == ("deep/a", 10, entry.tag)
            assert abs(found.modified - entry.modified) <= 1
    assert (found is None) == (volume.path is not None)
    volume.put("deep/a", b"01234")  # shorter than when it was listed
    if volume.path is None:
        assert volume.piece("deep/a", 0, 10)[0] == b"01234"
    with pytest.raises(VolumeMissing):
        volume.piece("deep/gone", 0, 10)


def test_what_is_not_there_is_said_to_be_missing(volume: Volume) -> None:
    volume.put("there", b"1")
    for name in ("gone", "there/below", "no/folder"):
        assert f"{volume.place}/{name}" in str(missing(volume, name))
        with pytest.raises(VolumeMissing):
            volume.read(name, 3, 4)
        with pytest.raises(VolumeMissing):
            volume.read_into(name, 0, memoryview(bytearray(3)))


def test_exactly_what_was_asked_for_is_read_or_nothing(volume: Volume) -> None:
    volume.put("f", b"0123456789")
    assert volume.read("f", 3, 4) == b"3456" and volume.read("f", 7) == b"789"
    assert (volume.read("f", 10), volume.read("f", 10, 0), volume.read("f", 4, 0)) == (b"", b"", b"")
    buffer = bytearray(12)
    volume.read_into("f", 2, memoryview(buffer)[1:4])
    volume.read_into("f", 10, memoryview(buffer)[:0])
    assert bytes(buffer) == b"\x00" + b"234" + bytes(8)
    for offset, length in ((8, 3), (0, 11), (10, 1), (11, None), (11, 0), (50, 5)):
        with pytest.raises(VolumeError, match="early") as caught:
            volume.read("f", offset, length)
        assert volume.shown("f") in str(caught.value)
    with pytest.raises(VolumeError, match="early"):
        volume.read_into("f", 5, memoryview(bytearray(6)))
    for offset, length in ((-1, None), (0, -1)):
        with pytest.raises(VolumeError):
            volume.read("f", offset, length)


def test_an_exclusive_put_is_won_by_one(volume: Volume) -> None:
    won, barrier = [], threading.Barrier(6)

    def claim(number: int) -> None:
        barrier.wait(60)
        try:
            volume.put("claims/one", b"%d" % number * 100, exclusive=True)
            won.append(number)
        except VolumeExists as error:
            assert "claims/one" in str(error)

    threads = [threading.Thread(target=claim, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(won) == 1 and volume.read("claims/one") == b"%d" % won[0] * 100
    assert names(volume) == {"claims/one": 100}


def test_a_large_file_is_written_in_parts_and_read_back(volume: Volume) -> None:
    data = os.urandom(3 * PART + 12_345)
    view = memoryview(data)
    volume.put("big", b"old")
    volume.upload("big", (view[start : start + 5_000_001] for start in range(0, len(data), 5_000_001)), len(data))
    assert volume.size("big") == len(data) and volume.read("big") == data
    buffer = bytearray(2 * PART + 7)
    volume.read_into("big", PART - 3, memoryview(buffer))
    assert buffer == data[PART - 3 : 3 * PART + 4]
    volume.upload("small", [b"ab", memoryview(b"cd"), b""], 4)
    volume.upload("empty", [], 0)
    assert volume.read("small") == b"abcd" and volume.size("empty") == 0


@pytest.mark.parametrize("size", [3, 2 * PART], ids=["small", "large"])
@pytest.mark.parametrize("change", [-1, 1])
def test_parts_of_another_size_are_refused(volume: Volume, size: int, change: int) -> None:
    volume.put("f", b"old")
    with pytest.raises(VolumeError, match=f"not {size} as announced"):
        volume.upload("f", iter([bytes(size - 1), bytes(1 + change)]), size)
    assert names(volume) == {"f": 3} and volume.read("f") == b"old"


@pytest.mark.parametrize("error", [FileNotFoundError("the source broke"), VolumeMissing("the source broke")])
def test_parts_that_fail_leave_nothing(volume: Volume, error: Exception) -> None:
    def parts() -> Iterator[bytes]:
        yield bytes(PART + 1)
        raise error

    with pytest.raises(type(error), match=r"^the source broke$"):
        volume.upload("f", parts(), 3 * PART)
    assert names(volume) == {} and volume.size("f") is None


BAD = ["", "/a", "a//b", "a/", "../a", "a/../b", "a/..", ".", "./a", "a/.", "a\0b", "..", "/", "\ud800"]


@pytest.mark.parametrize("name", BAD)
def test_a_name_that_leaves_the_volume_is_refused(volume: Volume, name: str) -> None:
    volume.put("kept", b"1")
    calls = [
        lambda: volume.size(name),
        lambda: volume.read(name),
        lambda: volume.read_into(name, 0, memoryview(bytearray(1))),
        lambda: volume.put(name, b"1"),
        lambda: volume.upload(name, [b"1"], 1),
        lambda: volume.delete(name),
    ]
    folders = [volume.list, volume.folders, volume.delete_folder, volume.at] if name else []
    for call in [*calls, *(lambda one=one: one(name) for one in folders)]:
        with pytest.raises(VolumeError, match="no name of a file"):
            call()
    assert names(volume) == {"kept": 1}


PARTS = st.text(st.characters(exclude_categories=["C"], exclude_characters="/"), min_size=1, max_size=12)
NAMES = st.lists(PARTS.filter(lambda part: part not in (".", "..")), min_size=1, max_size=3).map("/".join)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(name=NAMES, data=st.binary(max_size=50), cut=st.tuples(st.integers(0, 50), st.integers(0, 50)))
def test_any_name_and_any_part(volume: Volume, name: str, data: bytes, cut: tuple[int, int]) -> None:
    base = volume.at(uuid.uuid4().hex)
    base.put(name, data)
    assert names(base) == {name: len(data)} and base.size(name) == len(data) and base.read(name) == data
    offset, length = cut
    if offset + length <= len(data):
        assert base.read(name, offset, length) == data[offset : offset + length]
    else:
        with pytest.raises(VolumeError):
            base.read(name, offset, length)
    assert base.folders() == ([name.split("/")[0]] if "/" in name else [])
    base.delete(name)
    assert names(base) == {}


def test_a_probe_leaves_nothing(volume: Volume) -> None:
    volume.probe()
    assert names(volume) == {}


def test_readers_see_whole_files_while_they_are_replaced(volume: Volume) -> None:
    volume.put("f", bytes(100_000))
    done = threading.Event()
    seen: set[bytes] = set()

    def watch() -> None:
        while not done.is_set():
            seen.add(volume.read("f", 0, 100_000))

    thread = threading.Thread(target=watch)
    thread.start()
    for number in range(1, 20):
        volume.put("f", bytes([number]) * 100_000)
    done.set()
    thread.join(60)
    assert seen and all(len(set(one)) == 1 and len(one) == 100_000 for one in seen)
    assert volume.read("f") == bytes([19]) * 100_000
