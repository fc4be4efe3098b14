"""One listing for all ranks: what rank 0 found, or its error, however long that takes."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
import torch.distributed as dist
from torch.utils.data import DataLoader

from framework.data import VolumeDataset
from framework.data.files import listing, scan
from framework.distributed import World
from framework.errors import DataError
from tests.data.files_support import as_number, fill, names, read_number, write
from tests.loop.ranks import in_ranks


def lists_its_own_place(world: World, root: Path) -> tuple[list[str], str, bool]:
    """Ranks see different folders, as on a volume whose listing lags."""
    dataset = VolumeDataset(root / str(world.rank), decode=None, label=None)
    return names(dataset), dataset.fingerprint, str(world.rank) in dataset.place


def test_every_rank_has_the_files_that_rank_0_saw(tmp_path: Path) -> None:
    for rank in range(2):
        write(tmp_path / str(rank) / f"seen by {rank}")
    (one, own), (two, other) = (lambda a, b: ((a[:2], a[2]), (b[:2], b[2])))(
        *in_ranks(2, lists_its_own_place, tmp_path)
    )
    assert one == two and one[0] == ["seen by 0"] and own and other


def is_refused(world: World, root: Path) -> list[str]:
    messages = []
    for name in ("missing", "empty"):
        try:
            VolumeDataset(root / name, decode=None, list_timeout="0.1s")
        except DataError as error:
            messages.append(str(error))
    dataset = VolumeDataset(root / "good", decode=None, label=None)  # the ranks are still in step
    return [*messages, *names(dataset)]


def test_every_rank_gets_the_error_of_rank_0(tmp_path: Path) -> None:
    write(tmp_path / "good" / "a")
    (tmp_path / "empty").mkdir()
    one, two = in_ranks(2, is_refused, tmp_path)
    assert one == two
    assert one[0].startswith(f"{tmp_path}/missing is no folder") and one[1].startswith(f"{tmp_path}/empty has no files")
    assert one[2:] == ["a"]


def lists_slowly(world: World, root: Path) -> int:
    """Rank 0 takes far longer than a rank waits for a sign of life."""
    listing.SIGN_SECONDS, listing.WAIT_SECONDS = 0.2, 4.0
    look = scan.walk

    def slow(*arguments: object) -> object:
        time.sleep(6)
        return look(*arguments)  # type: ignore[arg-type]

    scan.walk = slow  # type: ignore[assignment]
    return len(VolumeDataset(root, decode=None, label=None))


def test_ranks_wait_as_long_as_rank_0_lists(tmp_path: Path) -> None:
    fill(tmp_path, 3)
    assert in_ranks(2, lists_slowly, tmp_path) == [3, 3]


def fails_badly(world: World, root: Path) -> str:
    def broken(*arguments: object) -> object:
        raise ZeroDivisionError("a bug")

    scan.walk = broken  # type: ignore[assignment]
    with pytest.raises(Exception) as info:
        VolumeDataset(root, decode=None, label=None)
    return repr(info.value)


def test_no_rank_waits_for_a_listing_that_broke(tmp_path: Path) -> None:
    fill(tmp_path, 3)
    one, two = in_ranks(2, fails_badly, tmp_path)
    assert one == "ZeroDivisionError('a bug')" and "Rank 0 could not list the files: ZeroDivisionError" in two


def reads_its_share(world: World, root: Path) -> tuple[list[int], list[int]]:
    """Paths by torch's own loader, with ranks that have joined: what the environment says is not asked."""
    os.environ.pop("WORLD_SIZE")
    dataset = VolumeDataset(root, decode=as_number, label=None)
    stream = dataset.paths()
    assert stream.__getstate__()["_rank"] == (world.rank, world.size)  # for workers that are not forked
    loader = DataLoader(
        stream, batch_size=3, num_workers=world.rank, multiprocessing_context="fork" if world.rank else None
    )
    shares = [[read_number(path) for batch in loader for path in batch] for _ in range(2)]
    assert dist.get_world_size() == world.size
    return shares[0], shares[1]


def test_ranks_that_have_joined_share_the_paths(tmp_path: Path) -> None:
    fill(tmp_path, 23)
    answers = in_ranks(3, reads_its_share, tmp_path)
    for epoch in range(2):
        assert sorted(number for answer in answers for number in answer[epoch]) == list(range(23))
