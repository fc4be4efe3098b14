"""Files of a mount that is slow, fails, lies and hangs come whole or with an error that names them."""

from __future__ import annotations

import errno
import os
import pickle
import random
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lookahead_support import content, fill, listed, name_of, read_all, wait_a_moment_for, wait_for
from support.faultfs import FaultFS

from framework.data.files.source import FileSource
from framework.errors import DataError

COUNT = 24
ROOT = Path(__file__).resolve().parents[2]

Opened = Callable[..., FileSource]


@pytest.fixture
def opened(faultfs: FaultFS) -> Iterator[Opened]:
    """`opened(**options)` is a source of the mount's files, closed at the end."""
    fill(faultfs.backing, COUNT)
    sources: list[FileSource] = []

    def make(**options: Any) -> FileSource:
        sources.append(FileSource(faultfs.path, None, listed(faultfs.backing), **options))
        return sources[-1]

    yield make
    faultfs.heal()
    for source in sources:
        source.close()


def opens(faultfs: FaultFS) -> Counter[str]:
    return Counter(path for _, path in faultfs.calls("open"))


def error_of(source: FileSource, index: int) -> str:
    with pytest.raises(DataError) as caught:
        source.bytes_of(index)
    return str(caught.value)


def test_what_is_announced_is_fetched_before_it_is_asked_for_and_once(opened: Opened, faultfs: FaultFS) -> None:
    source = opened()
    source.prefetch(range(COUNT))
    wait_for(lambda: len(faultfs.calls("flush")) == COUNT, "the files")
    faultfs.fail("open")  # nobody needs it any more
    read_all(source, COUNT)
    stats = source.take_stats()
    assert (stats.cache_misses, stats.bytes_fetched, sum(stats.reads.values())) == (COUNT, COUNT * 3000, COUNT)
    assert source.take_stats().cache_misses == 0


def test_as_many_requests_as_threads_are_under_way(opened: Opened, faultfs: FaultFS) -> None:
    source = opened(threads=5)
    faultfs.stall("open")
    source.prefetch(range(COUNT))
    wait_for(lambda: len(faultfs.calls("open")) >= 5, "five requests")
    assert not wait_a_moment_for(lambda: len(faultfs.calls("open")) > 5)
    faultfs.heal()
    faultfs.stall("read", after=COUNT - 5)
    wait_for(lambda: len(faultfs.calls("read")) >= COUNT, "the last five")
    assert opens(faultfs) == Counter({name_of(index): 1 for index in range(COUNT)})
    faultfs.heal()
    read_all(source, COUNT)


def test_no_more_is_held_than_the_budget(opened: Opened, faultfs: FaultFS) -> None:
    source = opened(budget_bytes=3 * 3000 + 100)
    source.prefetch(range(COUNT))
    wait_for(lambda: len(faultfs.calls("flush")) >= 3, "three files")
    assert not wait_a_moment_for(lambda: len(faultfs.calls("open")) > 3)
    for index in range(COUNT):
        assert len(faultfs.calls("open")) <= index + 3
        assert source.bytes_of(index) == content(index)
    assert len(faultfs.calls("open")) == COUNT


def test_what_is_asked_for_is_never_behind_what_is_announced(opened: Opened, faultfs: FaultFS) -> None:
    source = opened(threads=2)
    faultfs.stall("open", match="*/000[0-7].bin")
    source.prefetch(range(20))
    wait_for(lambda: len(faultfs.calls("open")) >= 2, "two requests")
    assert source.bytes_of(15) == content(15)  # announced
    assert source.bytes_of(22) == content(22)  # not announced
    faultfs.heal()
    read_all(source, COUNT)


def test_what_is_cancelled_is_not_fetched(opened: Opened, faultfs: FaultFS) -> None:
    source = opened(threads=2)
    faultfs.stall("open")
    source.prefetch(range(COUNT))
    wait_for(lambda: len(faultfs.calls("open")) >= 2, "two requests")
    source.cancel_prefetch()
    faultfs.heal()
    assert not wait_a_moment_for(lambda: len(faultfs.calls("open")) > 2)
    read_all(source, COUNT)


def test_a_file_that_is_announced_twice_is_there_twice_and_fetched_once(opened: Opened, faultfs: FaultFS) -> None:
    source = opened()
    source.prefetch([3, 4, 3])
    assert [source.bytes_of(index) for index in (3, 4, 3)] == [content(3), content(4), content(3)]
    assert opens(faultfs) == Counter({name_of(3): 1, name_of(4): 1})
    assert source.bytes_of(3) == content(3) and opens(faultfs)[name_of(3)] == 2


def test_several_threads_may_ask_for_the_same_files(opened: Opened) -> None:
    source = opened(threads=3)
    source.prefetch(range(COUNT))
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: read_all(source, COUNT), range(4)))


def test_what_may_pass_is_tried_again(opened: Opened, faultfs: FaultFS) -> None:
    source = opened()
    source.bytes_of(0)  # the mount itself is looked at once
    for error in (errno.EIO, errno.ETIMEDOUT, errno.ECONNRESET):
        for operation in ("open", "getattr", "read"):
            source.take_stats()
            faultfs.fail(operation, error=error, match="*/0005.bin", count=2)
            assert source.bytes_of(5) == content(5)
            assert source.take_stats().retries in (1, 2), (error, operation)  # the kernel may ask twice at once


def test_what_does_not_pass_is_named_with_attempts_and_cause(opened: Opened, faultfs: FaultFS) -> None:
    source = opened(deadline_seconds=0.5)
    faultfs.fail("read", match="*/0005.bin")
    source.prefetch([4, 5, 6])
    message = error_of(source, 5)
    assert str(faultfs.path / name_of(5)) in message and "Input/output error" in message
    attempts = len([path for _, path in faultfs.calls("open") if path == name_of(5)])
    assert f"({attempts} attempts in" in message and attempts > 1
    assert (source.bytes_of(4), source.bytes_of(6)) == (content(4), content(6))
    faultfs.heal()
    assert source.bytes_of(5) == content(5)


def test_what_will_not_pass_is_not_tried_again(opened: Opened, faultfs: FaultFS) -> None:
    source = opened()
    faultfs.fail("open", error=errno.EACCES, match="*/0001.bin")
    assert "(1 attempt in" in (message := error_of(source, 1)) and "Give this user access" in message
    (faultfs.backing / name_of(2)).unlink()
    assert "(1 attempt in" in (message := error_of(source, 2)) and "though it was listed" in message
    assert "unless manifest=frozen; a resume over other names or sizes needs run.allow=[data]" in message


def test_an_answer_that_ends_early_is_noticed(opened: Opened, faultfs: FaultFS) -> None:
    source = opened()
    faultfs.cut(1000, match="*/0001.bin", count=2)  # the second read finds the end
    assert source.bytes_of(1) == content(1) and source.take_stats().retries == 1
    faultfs.cut(1000, match="*/0001.bin")
    message = error_of(source, 1)
    assert "(3 attempts in" in message and "1000 bytes came of 3000" in message and name_of(1) in message


def test_files_that_changed_since_they_were_listed_are_refused(opened: Opened, faultfs: FaultFS) -> None:
    source = opened()
    (faultfs.backing / name_of(1)).write_bytes(content(1)[:-1])
    (faultfs.backing / name_of(2)).write_bytes(content(2) + b"x")
    (faultfs.backing / name_of(3)).write_bytes(content(33))
    source.prefetch(range(5))
    assert "it has 2999 bytes, and had 3000" in (message := error_of(source, 1)) and "(3 attempts in" in message
    assert "it has 3001 bytes, and had 3000" in error_of(source, 2)
    assert "was written since it was listed (last written at 20" in error_of(source, 3)
    assert source.bytes_of(4) == content(4)


def test_a_request_that_hangs_is_given_up_and_named(opened: Opened, faultfs: FaultFS) -> None:
    source = opened(threads=1, deadline_seconds=0.5)
    faultfs.stall("read", match="*/0001.bin")
    source.prefetch([1, 2, 3])
    message = error_of(source, 1)
    assert str(faultfs.path / name_of(1)) in message and "attempt 1 has had no answer for" in message
    assert [source.bytes_of(index) for index in (2, 3, 4)] == [content(index) for index in (2, 3, 4)]
    assert name_of(1) in error_of(source, 1)
    faultfs.heal()
    assert source.bytes_of(1) == content(1)


def test_a_mount_that_is_away_for_a_while_is_waited_for(opened: Opened, faultfs: FaultFS) -> None:
    source = opened()
    source.bytes_of(0)
    faultfs.vanish()
    source.prefetch(range(1, COUNT))
    wait_for(lambda: len(faultfs.calls("getattr")) > 10, "attempts")
    faultfs.heal()
    read_all(source, COUNT)
    assert source.take_stats().retries > 0


def test_the_random_numbers_of_samples_are_left_alone(opened: Opened, faultfs: FaultFS) -> None:
    source = opened()
    before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    faultfs.fail("open", count=5)
    source.prefetch(range(COUNT))
    read_all(source, COUNT)
    assert (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()) == before


@pytest.mark.parametrize("is_hanging", [False, True])
def test_a_forked_child_has_threads_of_its_own(opened: Opened, faultfs: FaultFS, is_hanging: bool) -> None:
    source = opened(threads=3)
    if is_hanging:
        faultfs.stall("read", match="*/000[0-2].bin")
        source.prefetch(range(COUNT))  # three threads hang, and what they hold hangs with them
        wait_for(lambda: len(faultfs.calls("open")) >= 3, "three requests")
    else:
        source.prefetch(range(3))  # three threads wait for work
        read_all(source, 3)
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            for index in range(3, COUNT):
                assert source.bytes_of(index) == content(index)
            source.close()
            status = 0
        finally:
            os._exit(status)
    try:
        wait_for(lambda: os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT), "the end of the child")
    finally:
        os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    faultfs.heal()
    read_all(source, COUNT)


def test_a_copy_begins_empty(opened: Opened) -> None:
    source = opened()
    read_all(source, 3)
    copy = pickle.loads(pickle.dumps(source))
    assert copy.take_stats().cache_misses == 0
    read_all(copy, COUNT)
    copy.close()
    copy.close()
    read_all(copy, 1)
    copy.close()


def test_threads_end_with_the_source(opened: Opened) -> None:
    before = threading.active_count()
    source = opened(threads=4)
    source.prefetch(range(COUNT))
    read_all(source, COUNT)
    assert threading.active_count() > before
    source.close()
    wait_for(lambda: threading.active_count() <= before, "the end of the threads")


ENDS = """
import sys
import torch, weakref
weakref.finalize(torch, print)  # its handler is registered before all of ours, and so runs after them
import framework.ending
framework.ending.PATIENCE_SECONDS = 1000.0
from pathlib import Path
sys.path.append(sys.argv[3])
from lookahead_support import FileSource, listed, read_all
source = FileSource(sys.argv[1], None, listed(Path(sys.argv[2])), threads=4)
source.prefetch(range(24))
read_all(source, 24)
"""


@pytest.mark.cold
def test_a_program_ends_though_its_source_was_never_closed(faultfs: FaultFS) -> None:
    fill(faultfs.backing, COUNT)
    words = [str(faultfs.path), str(faultfs.backing), str(Path(__file__).parent)]
    subprocess.run([sys.executable, "-c", ENDS, *words], check=True, timeout=100, cwd=ROOT)


def test_a_large_file_comes_in_pieces(opened: Opened, faultfs: FaultFS) -> None:
    data = os.urandom((17 << 20) + 3)
    (faultfs.backing / "big").write_bytes(data)
    source = opened()
    faultfs.fail("read", match="big", count=1)
    assert source.bytes_of(0) == data and source.take_stats().retries == 1


def test_files_on_a_local_disk_are_read_where_they_are(tmp_path: Path) -> None:
    folder = tmp_path / "files"
    fill(folder, 5)
    source = FileSource(folder, None, listed(folder))
    before = threading.active_count()
    source.prefetch(range(5))
    read_all(source, 5)
    assert source.path_of(3) == str(folder / name_of(3))
    assert threading.active_count() == before
    (folder / name_of(3)).write_bytes(b"cut")
    with pytest.raises(DataError, match="it has 3 bytes, and had 3000"):
        source.path_of(3)
    source.close()
