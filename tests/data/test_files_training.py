"""Runs over the files of a volume: killed, moved to other ranks and workers, and resumed over files that changed."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from support import assert_same, endure, events, every_step, global_batches, kill_at, start
from support.storage import S3
from support.survival import killed

from framework.volume import open_volume

COUNT, BATCH = 96, 8


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("training") / "files"
    for number in range(COUNT):
        path = root / f"part {number % 5}" / f"é{number}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{number}")
    return root


@pytest.fixture(scope="module")
def unbroken(folder: Path) -> Path:
    """The run over the folder by index without workers, never stopped."""
    start(*words("by_index", folder, "u"), cwd=folder.parent).ends(0)
    run = folder.parent / "runs" / "u"
    batches = global_batches(run)
    for epoch in range(2):
        steps = range(epoch * COUNT // BATCH + 1, (epoch + 1) * COUNT // BATCH + 1)
        assert sorted(number for step in steps for number in batches[step]) == list(range(COUNT))
    return run


def words(kind: str, root: Path | str, name: str, workers: int = 0, **options: object) -> tuple[str, ...]:
    """A run over the files, for two epochs and a bit."""
    given = "".join(f", {key}: {value}" for key, value in options.items())
    return (
        "+recipe=job", f"data.train={{_target_: job_files.{kind}, root: '{root}'{given}}}", f"run.name={name}",
        f"loader.num_workers={workers}", "trainer.max_steps=28", "trainer.eval_every=null", "data.eval=null",
        "+callbacks.done={_target_: tests.cases.case_parts.Synchronous}",
    )  # fmt: skip


@pytest.mark.parametrize("kind", ["by_index", "Decoding"])
def test_a_run_over_a_store_is_that_over_a_folder_bit_by_bit_over_kills(
    kind: str, s3: S3, folder: Path, unbroken: Path, tmp_path: Path
) -> None:
    """By index, and by paths that the user's code decodes, with workers and a cache that takes few of the files."""
    for path in folder.rglob("*.txt"):
        open_volume(s3.url).put(str(path.relative_to(folder)), path.read_bytes())
    run = words(kind, s3.url, "r", 2, cache=f"{{root: '{tmp_path}/cache', limit: 60}}")
    endure(*run, kill_at(18, "backward"), cwd=tmp_path)
    assert_same(unbroken, tmp_path / "runs" / "r")


def test_paths_are_trained_once_per_epoch_on_one_two_and_four_ranks(
    folder: Path, unbroken: Path, tmp_path: Path
) -> None:
    """One rank is killed in the first epoch, one of two in the second, and four go on, with a worker each."""
    run = words("Decoding", folder, "r", 1)
    start(*run, kill_at(9, "forward"), cwd=tmp_path).crashed()
    killed(start(*run, kill_at(17, "forward", rank=1, name="again"), cwd=tmp_path, ranks=2))
    start(*run, cwd=tmp_path, ranks=4).ends(0)
    trained: dict[int, list[int]] = {}
    for step in range(1, 29):
        ranks = 1 if step <= 5 else 2 if step <= 15 else 4  # checkpoints are every 5 steps
        lines = [line for rank in range(ranks) for line in every_step(tmp_path / "runs/r", rank) if line.step == step]
        last = max(line.attempt for line in lines)
        trained[step] = sorted(number for line in lines if line.attempt == last for number in line.ids)
    assert trained == {step: sorted(ids) for step, ids in global_batches(unbroken).items()}


def test_a_resume_over_other_files_is_refused_unless_the_list_is_frozen(
    folder: Path, unbroken: Path, tmp_path: Path
) -> None:
    root = tmp_path / "files"
    shutil.copytree(folder, root)
    start(*words("Decoding", root, "r"), kill_at(9, "forward"), cwd=tmp_path).crashed()
    for name in ("part 0/new.txt", "a new folder/new.txt"):
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).write_text("7")
    refused = start(*words("Decoding", root, "r"), cwd=tmp_path).ends(1).output()
    assert f"The files of {root} changed since the checkpoint: 98 files now, 96 then; 2 added (" in refused
    assert "manifest=frozen" in refused
    start(*words("Decoding", root, "r", 2, manifest="frozen"), cwd=tmp_path).ends(0)
    assert_same(unbroken, tmp_path / "runs" / "r")


def test_code_that_drops_samples_is_named_in_the_first_epoch(folder: Path, tmp_path: Path) -> None:
    ended = start(*words("Dropping", folder, "r", 2), cwd=tmp_path).ends(1)
    assert "Dropping is not one-to-one: it took more than 8 paths for 8 samples" in ended.output()


def test_evaluation_takes_files_by_index_and_paths_that_code_decodes_alike(folder: Path, tmp_path: Path) -> None:
    found = []
    for kind in ("by_index", "Decoding"):
        data = f"{{_target_: job_files.{kind}, root: '{folder}'}}"
        start(
            "+recipe=job", "~data.eval", f"+data.eval={data}", f"run.name={kind}", "trainer.max_steps=2",
            "trainer.eval_every=2", "loader.num_workers=1", cwd=tmp_path,
        ).ends(0)  # fmt: skip
        found.append([event["values"] for event in events(tmp_path / "runs" / kind, "metrics")])
    assert any("eval/loss" in values for values in found[0]) and found[0] == found[1]
