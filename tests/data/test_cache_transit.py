"""Files that are not kept have local paths for as long as they are in use, and go with their process."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from cache_support import ALL, another, counted, ended, fork

from framework.data.cache import CacheSpace, LocalCache, TransitArea
from framework.errors import DataError


@pytest.fixture
def space(tmp_path: Path) -> CacheSpace:
    return LocalCache(tmp_path / "cache", **ALL).open("d1")


@pytest.fixture
def area(space: CacheSpace) -> Iterator[TransitArea]:
    area = space.transit(limit=1000)
    yield area
    area.close()


def test_a_path_is_there_until_it_was_released_as_often_as_it_was_written(area: TransitArea) -> None:
    path = area.write("train/n01/x.JPEG", 6, [b"123", memoryview(b"456")])
    assert path.read_bytes() == b"123456" and str(path).endswith("/train/n01/x.JPEG")
    assert area.write("train/n01/x.JPEG", 6, [b"123456"]) == path and area.used == 6
    area.release(path)
    assert path.exists()
    area.release(str(path))
    assert not path.exists() and area.used == 0
    area.release(path)
    assert area.write("train/n01/x.JPEG", 3, [b"abc"]).read_bytes() == b"abc" and area.used == 3


def test_odd_names_are_files_too(area: TransitArea) -> None:
    keys = ["a", "a/b", "../up", "x" * 300, "new\nline", "bad\udcff", "nul\0", ""]
    paths = [area.write(key, 1, [str(number).encode()]) for number, key in enumerate(keys)]
    assert [path.read_bytes() for path in paths] == [str(number).encode() for number in range(len(keys))]
    assert all(os.path.realpath(path).startswith(f"{area.folder}/") for path in paths)
    for path in paths:
        area.release(path)
    assert area.used == 0 and not any(path.exists() for path in paths)


def test_it_is_bounded_for_what_is_fetched_ahead(area: TransitArea) -> None:
    area.write("a", 900, [bytes(900)])
    assert area.has_room(100) and not area.has_room(101)
    assert area.write("needed", 200, [bytes(200)]).stat().st_size == 200


def test_it_is_not_counted_as_kept(space: CacheSpace, area: TransitArea) -> None:
    area.write("a", 900, [bytes(900)])
    assert counted(space.cache) == 0 and space.path("a", 900) is None


def test_a_file_of_another_size_is_told(area: TransitArea) -> None:
    with pytest.raises(DataError, match=r"a\.jpg has 5 bytes by its listing, and 3 came"):
        area.write("a.jpg", 5, [b"123"])
    assert area.used == 0


def test_what_is_there_that_was_not_written_here_is_left_alone(area: TransitArea, tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("x")
    area.release(tmp_path / "mine")
    assert (tmp_path / "mine").exists()


def test_it_goes_when_it_is_closed_and_can_be_used_again(space: CacheSpace) -> None:
    area = space.transit()
    path = area.write("a", 1, [b"x"])
    area.close()
    area.close()
    assert not path.exists() and not os.listdir(area.folder) and area.used == 0
    assert area.write("a", 1, [b"x"]).exists()
    area.close()


def test_it_goes_with_its_process_and_with_one_that_was_killed(space: CacheSpace) -> None:
    with another(lambda: (area := space.transit(), area.write("a", 1, [b"x"]))) as pid:
        second = space.transit()
        second.write("b", 1, [b"x"])
        assert len(os.listdir(second.folder)) == 2  # it lives
        os.kill(pid, signal.SIGKILL)
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)  # and is not collected yet
        third = space.transit()
        third.write("c", 1, [b"x"])
        assert len(os.listdir(second.folder)) == 2
    second.close()
    third.close()


@pytest.mark.cold
def test_a_process_that_ends_leaves_nothing(space: CacheSpace) -> None:
    code = (
        "import sys, multiprocessing as m; from framework.data.cache import LocalCache\n"
        "area = LocalCache(sys.argv[1], min_free=0).open('d1').transit()\n"
        "def work(): area.write('b', 1, [b'x']); print(area.used)\n"
        "area.write('a', 1, [b'x'])\n"
        "worker = m.get_context('fork').Process(target=work); worker.start(); worker.join()\n"
        "import os; assert len(os.listdir(area.folder)) == 1\n"
    )
    command = [sys.executable, "-c", code, str(space.cache.root)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0 and done.stdout == "1\n", done.stderr
    assert not os.listdir(space.folder / "transit")


def test_a_child_begins_with_nothing_and_leaves_its_parents_files(area: TransitArea) -> None:
    path = area.write("a", 1, [b"x"])

    def child() -> None:
        assert area.used == 0
        area.release(path)
        mine = area.write("a", 1, [b"x"])
        assert mine != path
        area.close()
        assert path.exists() and not mine.exists()

    assert ended(fork(child)) == 0
    assert path.exists() and area.used == 1
    copy = pickle.loads(pickle.dumps(area))
    assert copy.used == 0 and copy.limit == 1000 and copy.write("a", 1, [b"x"]) != path
    copy.close()


def test_many_threads_write_and_release_the_same_files(area: TransitArea) -> None:
    failures: list[BaseException] = []

    def work() -> None:
        try:
            for number in range(60):
                key = f"k/{number % 5}"
                path = area.write(key, 20, [key.encode().ljust(20)])
                assert path.read_bytes() == key.encode().ljust(20)
                area.release(path)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not failures and area.used == 0
    assert not [path for path in area.folder.rglob("*") if path.is_file() and path.name != "lease"]


def test_where_the_disk_of_the_cache_is_full_another_one_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk, temporary = tmp_path / "disk", tmp_path / "temporary"
    disk.mkdir()
    temporary.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(disk)], capture_output=True).returncode:
        pytest.skip("no right to mount a file system here")
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    area = LocalCache(disk / "cache", **ALL).open("d1").transit()
    try:
        paths = [area.write(f"{number}/x", 400_000, [bytes(400_000)]) for number in range(4)]
        assert [path.is_relative_to(temporary) for path in paths] == [False, False, True, True]
        assert all(path.stat().st_size == 400_000 for path in paths) and area.used == 1_600_000
        (tmp_path / "file").write_text("no folder")
        area.close()
        assert not list(temporary.glob("*/*"))
        monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "file"))
        (disk / "other").write_bytes(bytes(900_000))
        with pytest.raises(DataError, match=r"x\.jpg cannot be given as a local path: .*No space left.*TMPDIR"):
            area.write("x.jpg", 400_000, [bytes(400_000)])
        assert area.used == 0
    finally:
        area.close()
        subprocess.run(["umount", "-l", str(disk)], check=True)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
def test_another_users_folder_for_temporary_files_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    (tmp_path / "file").write_text("no folder")
    place = tmp_path / f"goodput-transit-{os.geteuid()}"
    place.mkdir()
    os.chown(place, 12345, 12345)
    area = TransitArea(tmp_path / "file")
    with pytest.raises(DataError, match="another user"):
        area.write("a", 1, [b"x"])
    place.rmdir()
    place.symlink_to(tmp_path)
    with pytest.raises(DataError, match="another user"):
        area.write("a", 1, [b"x"])
