"""Object stores in processes that were forked after their parent used them, and in threads."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest
from support.storage import S3
from torch.utils.data import DataLoader, Dataset

from framework.volume import Volume, VolumeError, open_volume

ROOT = Path(__file__).resolve().parent.parent.parent
DATA = os.urandom((8 << 20) + 5)  # two parts
WAIT_SECONDS = 90.0


def forked(work: Callable[[], None]) -> int:
    """Exit code of a forked child that does the work: 0 if it raised nothing; killed after a bounded time."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            work()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    deadline = time.monotonic() + WAIT_SECONDS
    while time.monotonic() < deadline:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(pid, 9)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def use(volume: Volume, name: str) -> None:
    """All kinds of requests."""
    volume.put(f"{name}/a", b"123")
    volume.upload(f"{name}/big", iter([DATA]), len(DATA))
    assert volume.read(f"{name}/a") == b"123" and volume.read(f"{name}/big") == DATA
    assert sorted(entry.name for entry in volume.list(name)) == [f"{name}/a", f"{name}/big"]
    volume.delete(f"{name}/a")
    assert volume.size(f"{name}/a") is None


def test_a_child_of_a_process_that_used_a_store_can_use_it(s3: S3) -> None:
    volume = open_volume(s3.url)
    use(volume, "parent")

    def child() -> None:
        use(volume, "child")
        use(open_volume(s3.url), "own")
        assert forked(lambda: use(volume, "grandchild")) == 0
        use(volume, "again")

    assert forked(child) == 0
    assert forked(lambda: use(volume, "second")) == 0
    use(volume, "after")
    assert volume.folders() == ["after", "again", "child", "grandchild", "own", "parent", "second"]


def test_a_child_understands_errors(s3: S3) -> None:
    volume = open_volume(s3.url, retry_seconds=0.3)
    volume.put("a", b"1")
    s3.proxy.fail(503)

    def child() -> None:
        with pytest.raises(VolumeError, match="503"):
            volume.read("a")

    assert forked(child) == 0


def test_a_fork_in_the_middle_of_transfers_harms_neither_side(s3: S3) -> None:
    volume = open_volume(s3.url)
    for number in range(3):
        volume.put(f"many/{number}", b"1")
    listing = volume.list("many")
    next(listing)
    done, errors = threading.Event(), []

    def busy(number: int) -> None:
        try:
            while not done.is_set():
                use(volume, f"thread{number}")
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=busy, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()

    def child() -> None:
        listing.close()  # inherited in the middle of its pages
        use(volume, "child")

    codes = [forked(child) for _ in range(3)]
    done.set()
    for thread in threads:
        thread.join(WAIT_SECONDS)
    assert codes == [0, 0, 0] and errors == []
    assert len(list(listing)) == 2


PROGRAM = """
import os, sys
from framework.volume import open_volume
volume = open_volume(sys.argv[1])
volume.put("parent", b"1")
if os.fork() == 0:
    volume.put("child", b"2")
    del volume
    sys.exit(0)  # all objects are freed, those of the parent too, were they not kept
_, status = os.wait()
volume.put("after", b"3")
sys.exit(os.waitstatus_to_exitcode(status))
"""


def test_a_child_ends_like_any_process(s3: S3) -> None:
    command = [sys.executable, "-c", PROGRAM, s3.url]
    done = subprocess.run(command, cwd=ROOT, timeout=WAIT_SECONDS, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert sorted(entry.name for entry in open_volume(s3.url).list()) == ["after", "child", "parent"]


class Samples(Dataset[bytes]):
    """Samples that workers read from a volume which their parent has used."""

    def __init__(self, volume: Volume) -> None:
        self.volume = volume
        self.names = sorted(entry.name for entry in volume.list())

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, index: int) -> tuple[int, bytes]:
        return os.getpid(), self.volume.read(self.names[index])


def test_loader_workers_read_a_store_that_their_parent_used(s3: S3) -> None:
    volume = open_volume(s3.url)
    for number in range(8):
        volume.put(f"sample{number}", b"%d" % number)
    loader = DataLoader(
        Samples(volume), batch_size=None, num_workers=2, multiprocessing_context="fork", timeout=WAIT_SECONDS
    )
    for _ in range(2):
        got = list(loader)
        assert [data for _, data in got] == [b"%d" % number for number in range(8)]
        assert len({pid for pid, _ in got} - {os.getpid()}) == 2


def test_many_threads_share_one_volume(s3: S3) -> None:
    volume, errors = open_volume(s3.url), []

    def work(number: int) -> None:
        try:
            for turn in range(5):
                volume.put(f"t{number}", b"%d" % turn * 1000)
                assert volume.read(f"t{number}") == b"%d" % turn * 1000
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_SECONDS)
    assert errors == [] and len(list(volume.list())) == 12


def test_a_volume_travels_to_a_process_that_was_not_forked(s3: S3) -> None:
    volume = open_volume(s3.url).at("below")
    volume.put("a", b"1")
    code = "import pickle, sys; sys.stdout.buffer.write(pickle.load(sys.stdin.buffer).read('a'))"
    done = subprocess.run(
        [sys.executable, "-c", code],
        input=pickle.dumps(volume),
        cwd=ROOT,
        timeout=WAIT_SECONDS,
        capture_output=True,
        check=True,
    )
    assert done.stdout == b"1"


def test_opening_loads_neither_torch_nor_obstore() -> None:
    code = (
        "import sys, framework.volume as v; v.open_volume('/x'); v.open_volume('memory://x')\n"
        "assert not {'torch', 'obstore', 'numpy', 'requests'} & set(sys.modules), 'too much'"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=WAIT_SECONDS, check=True)


def test_a_missing_package_is_named_with_how_to_install_it() -> None:
    code = (
        "import sys; sys.modules['obstore'] = None\n"
        "from framework.volume import open_volume, VolumeError\n"
        "try: open_volume('s3://bucket/x')\n"
        "except VolumeError as error: print(error)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, timeout=WAIT_SECONDS, capture_output=True, text=True, check=True
    )
    assert "s3://bucket/x needs obstore: pip install 'goodput-framework[remote]'" in done.stdout
