"""Runs whose host is lost go on elsewhere from the remote place, with the same bits."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from support import committed_steps, contents, differences, events, kill_at, killed, settle, start
from support.storage import S3, s3  # noqa: F401

from framework.volume import open_volume

JOB = ("+recipe=job", "trainer.max_steps=24", "callbacks.async_checkpoint.every=4", settle())


def claim_of(place: str) -> dict[str, Any]:
    claim: dict[str, Any] = json.loads(open_volume(place).read("r/claim.json"))
    return claim


def words(place: str, host: str, *more: str) -> tuple[str, ...]:
    return (*JOB, "run.name=r", f"run.root={host}", f"callbacks.async_checkpoint.remote={place}", *more)


def test_a_run_whose_host_is_lost_goes_on_elsewhere_bitwise_equal(
    tmp_path: Path,
    unbroken: Callable[..., Path],
    s3: S3,  # noqa: F811
) -> None:
    killed(start(*words(s3.url, "host-a", kill_at(14, "backward")), cwd=tmp_path))
    first = claim_of(s3.url)
    start(*words(s3.url, "host-b", "run.resume=must"), cwd=tmp_path).ends(0)
    moved = tmp_path / "host-b" / "r"
    assert differences(contents(unbroken(*JOB)), contents(moved)) == []
    assert [event["step"] for event in events(moved, "restored")] == [12]
    saves = events(moved, "save_committed")
    assert [(save["step"], save["tier"]) for save in saves] == [(16, "both"), (20, "both"), (24, "both")]
    assert all(save["upload_seconds"] > 0 for save in saves)
    assert claim_of(s3.url)["token"] != first["token"]
    start(*words(s3.url, "host-c"), cwd=tmp_path).ends(0)  # finished: nothing is trained again
    assert committed_steps(tmp_path / "host-c" / "r") == [24]
    assert events(tmp_path / "host-c" / "r", "save_committed") == []


def test_two_ranks_go_on_elsewhere_bitwise_equal(tmp_path: Path, unbroken: Callable[..., Path]) -> None:
    place = str(tmp_path / "remote")
    killed(start(*words(place, "host-a", kill_at(10, "backward", rank=1)), cwd=tmp_path, ranks=2))
    start(*words(place, "host-b"), cwd=tmp_path, ranks=2).ends(0)
    assert differences(contents(unbroken(*JOB, ranks=2)), contents(tmp_path / "host-b" / "r")) == []


def test_a_place_out_of_reach_ends_a_start_with_its_url_and_makes_nothing(tmp_path: Path, s3: S3) -> None:  # noqa: F811
    s3.proxy.fail(500)
    run = start(*words(s3.url, "host-a", "callbacks.async_checkpoint.timeout=4s"), cwd=tmp_path)
    run.ends(1)
    assert s3.url in run.output()
    assert not (tmp_path / "host-a").exists()
    s3.proxy.heal()
    s3.proxy.deny()
    run = start(*words(s3.url, "host-a"), cwd=tmp_path)
    run.ends(1)
    assert s3.url in run.output() and not (tmp_path / "host-a").exists()
