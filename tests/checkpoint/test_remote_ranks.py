"""Several ranks upload, agree and fetch together, whether their hosts share a disk or not."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from checkpoint_support import SOLO, blank, in_ranks, leaves, small_state, solo_group
from remote_support import make_tier, names, open_remote, remote_reader, save_remotely

from framework.checkpoint import CheckpointReader, CheckpointStore
from framework.checkpoint.remote import homes
from framework.checkpoint.retention import Keep
from framework.distributed import Group, World


def store_of(folder: Path, rank: int, is_shared: bool) -> CheckpointStore:
    """The store of a rank: the same for all, or of a host of its own."""
    return CheckpointStore(folder / ("host" if is_shared else f"host-{rank}") / "checkpoints")


def group_of(world: World) -> Group:
    homes.LOOK_SECONDS = 0.3
    return Group(world, timeout_seconds=30, name="checkpoint")


def assert_loads(reader: CheckpointReader, step: int) -> None:
    found = reader.newest_valid()
    assert found is not None and found.step == step
    expected = small_state(step)
    loaded = blank(expected.tensors)
    reader.load(found, loaded)
    for ours, theirs in zip(leaves(loaded), leaves(expected.tensors), strict=True):
        assert torch.equal(ours, theirs)


def saving(world: World, folder: Path, is_shared: bool, steps: list[int]) -> list[Any]:
    store = store_of(folder, world.rank, is_shared)
    tier = make_tier(folder / "remote", store, group=group_of(world))
    tier.probe()
    return [
        (result.committed, result.tier, result.local, result.error)
        for result in (save_remotely(tier, step, keep=Keep(last=2)) for step in steps)
    ]


def restarting(world: World, folder: Path, is_shared: bool, step: int) -> list[str]:
    store = store_of(folder, world.rank, is_shared)
    tier = make_tier(folder / "remote", store, group=group_of(world), attempt=2)
    fetched: list[str] = []
    read_into = tier.volume.read_into

    def watched(name: str, *arguments: Any) -> None:
        fetched.append(name)
        read_into(name, *arguments)

    tier.volume.read_into = watched  # type: ignore[method-assign]
    assert_loads(remote_reader(tier), step)
    return fetched


def test_each_rank_uploads_its_files_and_one_fetches_for_all_that_share_a_disk(tmp_path: Path) -> None:
    for outcomes in in_ranks(2, saving, tmp_path, True, [1, 2, 3]):
        assert outcomes == [(True, "both", True, None)] * 3
    copies = make_tier(tmp_path / "remote", CheckpointStore(tmp_path / "x")).list()
    assert [copy.step for copy in copies] == [3, 2]
    assert {name.partition(".")[0] for name in copies[0].manifest.files} == {
        "__0_0", "__1_0", "rank_0", "rank_1", "shared",
    }  # fmt: skip
    os.rename(tmp_path / "host", tmp_path / "gone")
    fetched = in_ranks(2, restarting, tmp_path, True, 3)
    assert len(fetched[0]) == 5 and fetched[1] == []


def test_hosts_with_disks_of_their_own_save_remotely_and_fetch_for_themselves(tmp_path: Path) -> None:
    for outcomes in in_ranks(2, saving, tmp_path, False, [1, 2]):
        assert outcomes == [(True, "remote", False, None)] * 2
    assert not list(tmp_path.glob("host-*/**/.metadata"))  # no host has a whole one
    assert len(list((tmp_path / "host-1" / "checkpoints").glob("step_*"))) == 1
    fetched = in_ranks(2, restarting, tmp_path, False, 2)
    assert not any("__1_0" in name for name in fetched[1]) and any("__0_0" in name for name in fetched[1])
    again = in_ranks(2, restarting, tmp_path, False, 2)
    assert again == [[], []]
    assert_loads(remote_reader(make_tier(tmp_path / "remote", CheckpointStore(tmp_path / "solo"), attempt=3)), 2)


def failing(world: World, folder: Path) -> Any:
    store = store_of(folder, world.rank, True)
    tier = make_tier(folder / "remote", store, group=group_of(world))
    good = tier.volume
    if world.rank == 1:
        (folder / "file").write_bytes(b"")
        tier.volume = open_remote(folder / "file")
    failed = save_remotely(tier, 1)
    tier.volume = good
    before = names(folder / "remote")
    again = tier.push_again()
    assert again is not None and again.committed and again.tier == "both"
    return failed.committed, failed.local, failed.error, sorted(before)


def test_a_failed_upload_of_one_rank_is_heard_by_all_and_made_up_for(tmp_path: Path) -> None:
    answers = in_ranks(2, failing, tmp_path)
    assert [answer[:3] for answer in answers] == [answers[0][:3]] * 2
    committed, local, error, before = answers[0]
    assert not committed and local and "rank 1" in error and str(tmp_path / "file") in error
    assert not any(name.endswith(".metadata") for name in before)
    assert SOLO.is_main and solo_group().all_gather(1) == [1]


def unreachable(world: World, folder: Path) -> str:
    tier = make_tier(folder / "remote", store_of(folder, world.rank, True), group=group_of(world))
    if world.rank == 1:
        (folder / "file").write_bytes(b"")
        tier.volume = open_remote(folder / "file")
    try:
        tier.probe()
    except Exception as error:
        return str(error)
    return ""


def test_a_place_that_one_rank_cannot_write_is_an_error_on_all_before_training(tmp_path: Path) -> None:
    first, second = in_ranks(2, unreachable, tmp_path)
    assert first == second and "(rank 1)" in first and "file" in first
