"""Which files are found: odd names, links, hidden and empty ones, places that are slow, late, failing or away."""

from __future__ import annotations

import errno
import logging
import os
import socket
import threading
import time
from pathlib import Path

import pytest
from files_support import write
from support.faultfs import FaultFS
from support.storage import S3

from framework.data.files import scan as scanning
from framework.data.files import walk as walking
from framework.data.files.scan import Choice, Listing, scan
from framework.errors import DataError
from framework.volume import open_volume

ODD = [
    "a b.bin", "é.bin", "e\u0301.bin", "線 路/😀.bin", "new\nline.bin", "quo'te\"\\.bin", "%20#?&;.bin", "-x.bin",
    "a/b/c/d/e.bin", "UPPER.BIN", "a-b/1.bin", "~", "x" * 250,
]  # fmt: skip


def look(place: Path | str, choice: Choice = Choice(), seconds: float = 0.0) -> Listing:  # noqa: B008 (it is frozen)
    return scan(open_volume(place), choice, timeout_seconds=seconds, report=lambda count: None)


def found(place: Path | str, choice: Choice = Choice(), seconds: float = 0.0) -> list[str]:  # noqa: B008
    manifest = look(place, choice, seconds).manifest
    return [manifest.name(index) for index in range(len(manifest))]


@pytest.fixture(autouse=True)
def _told(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "framework.data.files")


def test_odd_names_come_as_they_are_in_byte_order(tmp_path: Path) -> None:
    for name in ODD:
        write(tmp_path / name, name.encode())
    raw = b"raw-\xff\xfe.bin"
    with open(os.path.join(os.fsencode(tmp_path), raw), "wb") as stream:
        stream.write(b"raw")
    assert found(tmp_path) == [os.fsdecode(name) for name in sorted([*map(os.fsencode, ODD), raw])]


def test_sizes_and_times_are_those_of_the_files(tmp_path: Path) -> None:
    os.utime(write(tmp_path / "a", b"12345"), ns=(1, 1_234_567_890_123_456_789))
    manifest = look(tmp_path).manifest
    assert (manifest.size(0), manifest.stamp(0)) == (5, 1_234_567_890_123_456_789)
    assert manifest.origin == str(tmp_path)


def test_hidden_empty_and_special_files_are_left_out_and_counted_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("dog/a.jpg", "dog/b.JPG", "cat/c.jpeg"):
        write(tmp_path / name)
    for name in (".DS_Store", ".ipynb_checkpoints/a.jpg", "dog/._a.jpg", "dog/.git/x.jpg"):
        write(tmp_path / name)
    for number in range(5):
        write(tmp_path / f"dog/empty {number}.jpg", b"")
    write(tmp_path / "dog" / "notes.txt")
    os.mkfifo(tmp_path / "dog" / "pipe.jpg")
    with socket.socket(socket.AF_UNIX) as one:
        one.bind(str(tmp_path / "cat" / "s.jpg"))
        assert found(tmp_path, Choice((".jpg", ".jpeg"))) == ["cat/c.jpeg", "dog/a.jpg", "dog/b.JPG"]
    (line,) = [record for record in caplog.records if "left out" in record.getMessage()]
    assert line.levelno == logging.WARNING  # files without a byte are most often broken copies
    assert line.getMessage() == (
        f"{tmp_path}: 3 files, 3 bytes; left out: 4 hidden, 5 empty, 0 bytes ('dog/empty 0.jpg', 'dog/empty 1.jpg', "
        f"'dog/empty 2.jpg', …), 1 with another ending, 2 that are no regular files."
    )


def test_links_are_followed_and_never_in_a_circle(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    place, other = tmp_path / "place", tmp_path / "other"
    write(place / "dog" / "a.bin")
    write(other / "deep" / "b.bin")
    (place / "cat").symlink_to(other)
    (place / "dog" / "link.bin").symlink_to("a.bin")
    (place / "dog" / "again").symlink_to(place / "dog")
    (other / "deep" / "up").symlink_to(place)
    (place / "self").symlink_to("self")
    (place / "dangling.bin").symlink_to("nowhere")
    assert found(place) == ["cat/deep/b.bin", "dog/a.bin", "dog/link.bin"]
    assert "4 broken or circular links" in caplog.text  # again, up, self, dangling
    (tmp_path / "entry").symlink_to(place)
    assert len(found(tmp_path / "entry")) == 3


def test_a_folder_that_two_links_lead_to_belongs_to_both(tmp_path: Path) -> None:
    write(tmp_path / "shared" / "a.bin")
    for name in ("cat", "dog"):
        (tmp_path / "place" / name).mkdir(parents=True)
        (tmp_path / "place" / name / "more").symlink_to(tmp_path / "shared")
    assert found(tmp_path / "place") == ["cat/more/a.bin", "dog/more/a.bin"]


def test_classes_are_the_folders_in_byte_order_without_files_too(tmp_path: Path) -> None:
    for name in ("dog/1", "a-b/1", "a/1", "Zoo/deep/1", "loose"):
        write(tmp_path / name)
    for name in ("empty", ".hidden", "only hidden/.x"):
        (tmp_path / name).mkdir(parents=True)
    listing = look(tmp_path, Choice(has_classes=True))
    assert listing.classes == ["Zoo", "a", "a-b", "dog", "empty", "only hidden"]
    assert listing.manifest.raws() == [b"Zoo/deep/1", b"a-b/1", b"a/1", b"dog/1"]
    flat = look(write(tmp_path / "flat" / "x").parent, Choice(has_classes=True))
    assert (flat.classes, flat.manifest.raws()) == ([], [b"x"])


def test_folders_in_folders_are_entered_only_if_asked_for(tmp_path: Path) -> None:
    for name in ("top", "dog/1", "dog/deep/2"):
        write(tmp_path / name)
    assert found(tmp_path) == ["dog/1", "dog/deep/2", "top"]
    assert found(tmp_path, Choice(recursive=False)) == ["top"]
    assert found(tmp_path, Choice(recursive=False, has_classes=True)) == ["dog/1"]


def test_a_large_folder_is_listed_whole(tmp_path: Path) -> None:
    count = 2 * walking.CHUNK + 3
    for number in range(count):
        write(tmp_path / "one" / f"{number:05d}")
    assert found(tmp_path) == [f"one/{number:05d}" for number in range(count)]


def test_files_that_show_late_are_waited_for(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write(tmp_path / "a" / "unfinished", b"")

    def write_late() -> None:
        while "no files yet" not in caplog.text:
            time.sleep(0.005)
        write(tmp_path / "a" / "late")

    writer = threading.Thread(target=write_late)
    writer.start()
    assert found(tmp_path, seconds=60.0) == ["a/late"]
    writer.join()
    assert f"{tmp_path} has no files yet; looking again for up to " in caplog.text


def test_a_place_that_stays_empty_is_an_error_with_what_was_left_out(tmp_path: Path) -> None:
    write(tmp_path / ".hidden")
    write(tmp_path / "empty", b"")
    expected = r"has no files, within 0\.3 s \(list_timeout\)\. Left out: 1 hidden, 1 empty, 0 bytes \('empty'\)\."
    with pytest.raises(DataError, match=expected):
        found(tmp_path, seconds=0.3)


def test_files_of_other_endings_are_not_waited_for(tmp_path: Path) -> None:
    write(tmp_path / "a.txt")
    with pytest.raises(DataError, match=r"has no files that end in \.jpg, \.png\. Left out: 1 with another ending"):
        found(tmp_path, Choice((".jpg", ".png")), seconds=3600.0)


def test_a_folder_that_is_not_there_is_named_at_once_on_a_disk(tmp_path: Path) -> None:
    for name in ("nowhere", "file"):
        write(tmp_path / "file")
        with pytest.raises(DataError, match=f"{tmp_path / name} is no folder"):
            found(tmp_path / name, seconds=3600.0)


def test_a_folder_that_shows_late_on_a_mount_is_waited_for(faultfs: FaultFS) -> None:
    writer = threading.Timer(0.5, lambda: write(faultfs.path / "late" / "a"))
    writer.start()
    assert found(faultfs.path / "late", seconds=60.0) == ["a"]
    writer.join()
    with pytest.raises(DataError, match="never is no folder"):
        found(faultfs.path / "never", seconds=0.3)


def test_a_mount_that_fails_for_a_moment_is_asked_again(faultfs: FaultFS) -> None:
    for number in range(6):
        write(faultfs.backing / f"c{number % 2}" / f"{number}")
    faultfs.fail("readdir", error=errno.EIO, match="*c1*", count=1)
    faultfs.fail("getattr", error=errno.ESTALE, match="*c0/2", count=2)
    assert found(faultfs.path, seconds=60.0) == ["c0/0", "c0/2", "c0/4", "c1/1", "c1/3", "c1/5"]
    asked = [path.rpartition("/")[2] for _, path in faultfs.calls("getattr")]
    assert asked.count("2") >= 3


def test_a_folder_that_cannot_be_read_is_an_error_and_no_smaller_dataset(faultfs: FaultFS) -> None:
    for name in ("c0/1", "c1/1"):
        write(faultfs.backing / name)
    faultfs.fail("readdir", error=errno.EACCES, match="*c1*")
    with pytest.raises(DataError, match=rf"{faultfs.path}/c1 cannot be read: Permission denied"):
        found(faultfs.path, seconds=60.0)
    faultfs.heal()
    faultfs.fail("getattr", error=errno.EIO, match="*c1/1")
    with pytest.raises(DataError, match=rf"{faultfs.path}/c1/1 cannot be listed: Input/output error"):
        found(faultfs.path, seconds=0.2)


def test_a_mount_that_does_not_answer_is_an_error_that_names_the_folder(
    faultfs: FaultFS, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(faultfs.backing / "good" / "1")
    write(faultfs.backing / "stuck" / "1")
    monkeypatch.setattr(walking, "STALL_SECONDS", 1.0)
    faultfs.stall("readdir", match="*stuck*")
    with pytest.raises(DataError, match=rf"has not moved for 1 s: the mount does not answer for {faultfs.path}/stuck"):
        found(faultfs.path, seconds=60.0)
    faultfs.heal()


def test_folders_of_a_slow_mount_are_listed_beside_each_other(faultfs: FaultFS) -> None:
    for number in range(20):
        write(faultfs.backing / f"c{number:02d}" / "1")
    faultfs.stall("readdir", match="*c07*")
    listings: list[list[str]] = []
    thread = threading.Thread(target=lambda: listings.append(found(faultfs.path)))
    thread.start()
    deadline = time.monotonic() + 60
    while len({path for _, path in faultfs.calls("readdir")}) < 21:  # while one does not answer
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert not listings
    faultfs.heal()
    thread.join(60)
    assert listings == [[f"c{number:02d}/1" for number in range(20)]]


def test_objects_of_a_store_are_listed_like_files(s3: S3, caplog: pytest.LogCaptureFixture) -> None:
    volume = open_volume(s3.url)
    names = ["dog/a b.bin", "dog/é%20+#.bin", "dog/e\u0301.bin", "cat/deep/x.bin", "loose.bin", "a-b/1.BIN"]
    for name in (*names, "dog/.hidden/x.bin", "._x.bin", "dog/notes.txt"):
        volume.put(name, name.encode())
    volume.put("dog/empty.bin", b"")
    s3.server.ask("PUT", f"/{s3.bucket}/prefix/marked/")  # as consoles make a folder
    s3.server.ask("PUT", f"/{s3.bucket}/prefixed/other.bin", b"x")  # of another dataset
    listing = look(s3.url, Choice((".bin",), has_classes=True))
    assert listing.classes == ["a-b", "cat", "dog", "marked"]
    wanted = sorted(name.encode() for name in names if "/" in name)
    assert listing.manifest.raws() == wanted
    assert [listing.manifest.size(index) for index in range(len(wanted))] == [len(name) for name in wanted]
    assert all(listing.manifest.tags) and all(listing.manifest.modified)
    assert "left out: 2 hidden, 1 empty, 0 bytes ('dog/empty.bin'), 1 with another ending, 1 outside the" in caplog.text
    assert found(s3.url, Choice((".bin",), recursive=False)) == ["loose.bin"]


def test_a_store_that_shows_objects_late_is_asked_again(s3: S3) -> None:
    writer = threading.Timer(0.5, lambda: s3.server.ask("PUT", f"/{s3.bucket}/prefix/late", b"x"))
    writer.start()
    assert found(s3.url, seconds=60.0) == ["late"]
    writer.join()
    with pytest.raises(DataError, match=f"{s3.url}/nothing has no files, within 0.2 s"):
        found(s3.url + "/nothing", seconds=0.2)


def test_progress_is_reported_while_it_lists(tmp_path: Path) -> None:
    for number in range(5):
        write(tmp_path / f"{number}")
    counts: list[int] = []
    scanning.scan(open_volume(tmp_path), Choice(), timeout_seconds=0, report=counts.append)
    assert counts == [1, 2, 3, 4, 5]
