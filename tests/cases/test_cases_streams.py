"""Streams: DP-01, DP-06, DP-08, DP-11, SH-01, EL-06, PF-03 and RN-01 where samples have no index."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from case_tools import part
from support import assert_same, committed_steps, endure, events, every_step, global_batches, kept, kill_at, start

from framework.data.audit.check import audit

STREAMS = ("Plain", "Shards")


def data(name: str, **options: object) -> str:
    """The words that make a class of `job_streams` the training data."""
    given = "".join(f", {key}: {value}" for key, value in options.items())
    return f"data.train={{_target_: job_streams.{name}{given}}}"


def once_per_epoch(run: Path, epochs: int, ranks: int = 1) -> bool:
    """Whether the kept history has each of the 96 samples once in each epoch, in steps of whole epochs."""
    batches = global_batches(run, ranks)
    steps = 96 // len(batches[1])
    found = [sorted(i for step in range(e * steps, (e + 1) * steps) for i in batches[step + 1]) for e in range(epochs)]
    return len(batches) == epochs * steps and all(ids == list(range(96)) for ids in found)


@pytest.mark.parametrize(("name", "workers"), [("Plain", 2), ("Shards", 0), ("Shards", 2)])
def test_dp_01_the_place_of_a_stream_is_after_what_was_trained(name: str, workers: int, tmp_path: Path) -> None:
    """The position counts what workers prefetched; or is incomplete when asked right after a resume."""
    words = (
        "+recipe=job",
        data(name),
        "trainer.max_steps=24",
        f"loader.num_workers={workers}",
        "trainer.eval_every=null",
    )
    words = (*words, "callbacks.async_checkpoint={every: 1, keep: null}", part("Synchronous"))
    start(*words, "run.name=u", cwd=tmp_path).ends(0)
    kills = (kill_at(5, "forward"), kill_at(6, "forward", name="again"))
    endure(*words, *kills, "run.name=r", cwd=tmp_path)
    run = tmp_path / "runs/r"
    assert [event["step"] for event in events(run, "restored")] == [4, 5]
    assert once_per_epoch(run, 2)
    assert_same(tmp_path / "runs/u", run)


def test_a_shard_dataset_in_the_usual_style_is_alive_over_epochs(tmp_path: Path) -> None:
    """Each sample once in epochs 1 to 3, with 0 and with 2 workers, through a kill in the middle of the second."""
    for workers in (0, 2):
        words = ("+recipe=job", data("Shards", shard=13), "trainer.max_steps=36", f"loader.num_workers={workers}")
        words = (*words, "callbacks.data_position.audit=true")
        endure(*words, f"run.name=r{workers}", kill_at(20, "backward"), cwd=tmp_path)
        run = tmp_path / f"runs/r{workers}"
        assert once_per_epoch(run, 3) and audit(run / "events").is_clean


def test_dp_06_a_stream_without_a_state_is_read_again_up_to_the_sample_and_that_is_told(tmp_path: Path) -> None:
    """A stateless iterable stream is silently restarted from its beginning on resume."""
    words = (
        "+recipe=job",
        data("Plain"),
        "trainer.max_steps=24",
        "run.name=r",
        "loader.num_workers=2",
        part("Synchronous"),
    )
    last = endure(*words, kill_at(9, "forward"), cwd=tmp_path)[-1]
    run = tmp_path / "runs/r"
    (event,) = events(run, "restored")
    assert event["step"] == 5 and once_per_epoch(run, 2)
    assert "Plain has no state that it could go on from: epoch 0 is read again up to sample 40" in last.output()


@pytest.mark.parametrize(("name", "size"), [("Plain", 4), ("Shards", 16)])
def test_dp_08_another_batch_size_goes_on_at_the_same_sample_of_a_stream(name: str, size: int, tmp_path: Path) -> None:
    """Batch size changed on resume: position is kept in batches, so samples are skipped or repeated."""
    words = (
        "+recipe=job",
        data(name),
        "~trainer.max_steps",
        "trainer.max_epochs=1",
        "callbacks.async_checkpoint.every=6",
    )
    words = (*words, "run.name=r", part("Synchronous"))
    start(*words, kill_at(7, "forward"), cwd=tmp_path).crashed()
    again = start(*words, f"trainer.global_batch_size={size}", cwd=tmp_path).ends(0)
    run = tmp_path / "runs/r"
    assert f"global batch is now {size}, was 8" in again.output()
    rest = [line for line in every_step(run) if line.attempt == 2]
    assert [line.step for line in rest] == list(range(7, 7 + 48 // size))
    assert [number for line in rest for number in line.ids] == list(range(48, 96))


def test_dp_11_restarts_do_not_replay_the_head_of_a_stream(tmp_path: Path) -> None:
    """Every restart replays the head of the same permutation: head over-sampled, tail never seen."""
    words = (
        "+recipe=job",
        data("Shards", samples=200),
        "trainer.max_steps=50",
        "run.name=r",
        "trainer.eval_every=null",
    )
    words = (*words, "callbacks.async_checkpoint.every=1", part("Synchronous"), "loader.num_workers=2")
    kills = [kill_at(6 * number, "forward", name=f"kill{number}") for number in range(1, 9)]
    endure(*words, *kills, cwd=tmp_path)
    seen = Counter(number for line in kept(tmp_path / "runs/r").values() for number in line.ids)
    assert seen == dict.fromkeys(range(200), 2)


def test_sh_01_a_stream_that_every_reader_would_read_in_full_is_refused_by_name(tmp_path: Path) -> None:
    """An iterable dataset is read in full by every rank and every worker."""
    words = (
        "+recipe=job",
        data("Whole"),
        "trainer.max_steps=24",
        "trainer.global_batch_size=16",
        "loader.num_workers=2",
    )
    refused = start(*words, "run.name=r", cwd=tmp_path, ranks=2)
    assert refused.wait() != [0]
    for text in ("Whole gives the same samples to rank 0 worker 0 and rank 0 worker 1", "loader.split=samples"):
        assert text in refused.output()
    assert not committed_steps(tmp_path / "runs/r")
    start(*words, "run.name=s", "loader.split=samples", cwd=tmp_path, ranks=2).ends(0)
    batches = global_batches(tmp_path / "runs/s", 2)
    assert [batches[step] for step in range(1, 7)] == [list(range(16 * k, 16 * k + 16)) for k in range(6)]


@pytest.mark.parametrize("name", STREAMS)
def test_sh_01_a_stream_that_splits_itself_is_trained_once(name: str, tmp_path: Path) -> None:
    """An iterable dataset is read in full by every rank and every worker."""
    words = ("+recipe=job", data(name), "trainer.max_steps=12", "trainer.global_batch_size=16", "loader.num_workers=2")
    endure(*words, "run.name=r", kill_at(8, "forward", rank=1), cwd=tmp_path, ranks=2)
    assert once_per_epoch(tmp_path / "runs/r", 2, ranks=2)


def test_sh_01_where_it_cannot_be_seen_there_is_a_warning(tmp_path: Path) -> None:
    """A check that cannot tell says so, and refuses nothing."""
    words = ("+recipe=job", data("Alike"), "trainer.max_steps=2", "loader.num_workers=2", "run.name=r")
    run = start(*words, cwd=tmp_path).ends(0)
    assert "Alike: the first samples of all readers (1 rank x 2 readers) are one and the same" in run.output()


def test_el_06_other_ranks_keep_the_global_batch_or_are_refused_by_numbers(tmp_path: Path) -> None:
    """The global batch silently changes with the number of ranks."""
    words = ("+recipe=job", "trainer.max_steps=12", "trainer.global_batch_size=16", "trainer.micro_batch_size=8")
    words = (*words, "callbacks.async_checkpoint.every=1", part("Synchronous"))
    for name, split in (("Whole", "samples"), ("Shards", "null")):
        run = (*words, data(name), f"loader.split={split}", f"run.name={name}")
        start(*run, kill_at(5, "forward"), cwd=tmp_path, ranks=2).crashed()
    again = start(*words, data("Whole"), "loader.split=samples", "run.name=Whole", cwd=tmp_path).ends(0)
    assert "world size is now 1, was 2" in again.output()
    assert once_per_epoch_on_either(tmp_path / "runs/Whole")
    refused = start(*words, data("Shards"), "run.name=Shards", cwd=tmp_path).ends(1)
    for text in ("made by 2 ranks x 1 reader, this run has 1 rank x 1 reader", "Shards"):
        assert text in refused.output()


def once_per_epoch_on_either(run: Path) -> bool:
    """Steps of two ranks until the kill, of one after it: 16 samples each, each sample once in each of two epochs."""
    first = [line for rank in range(2) for line in every_step(run, rank) if line.attempt == 1 and line.step <= 4]
    later = [line for line in every_step(run) if line.attempt == 2]
    seen = Counter((line.step > 6, number) for line in (*first, *later) for number in line.ids)
    return {line.step for line in later} == set(range(5, 13)) and set(seen.values()) == {1} and len(seen) == 192


def test_pf_03_a_stream_with_a_state_is_not_read_again(tmp_path: Path) -> None:
    """Resume loads and throws away all earlier batches."""
    log = tmp_path / "made"
    words = ("+recipe=job", data("Shards", samples=400, log=log), "trainer.max_steps=50", "run.name=r")
    words = (*words, "callbacks.async_checkpoint.every=10", part("Synchronous"), "loader.num_workers=2")
    start(*words, kill_at(45, "forward"), cwd=tmp_path).crashed()
    log.unlink()
    start(*words, cwd=tmp_path).ends(0)
    assert [event["step"] for event in events(tmp_path / "runs/r", "restored")] == [40]
    made = {int(line) for line in log.read_text().splitlines()}
    ahead = 10  # batches: at the end, those of the next epoch were asked for, and one sample more by each worker
    trained = {number for line in kept(tmp_path / "runs/r").values() if ahead < line.step <= 40 for number in line.ids}
    assert made and not made & trained
    seen = Counter(number for line in kept(tmp_path / "runs/r").values() for number in line.ids)
    assert seen == dict.fromkeys(range(400), 1)


def test_rn_01_each_rank_draws_on_where_it_was(tmp_path: Path) -> None:
    """Only rank 0's RNG is saved and given to all ranks on resume."""
    words = (
        "+recipe=job",
        data("Shards"),
        "trainer.max_steps=12",
        "trainer.global_batch_size=16",
        "loader.num_workers=2",
    )
    words = (*words, "recipe._target_=tests.cases.case_parts.DrawingJob", part("Draws"))
    start(*words, "run.name=u", cwd=tmp_path, ranks=2).ends(0)
    endure(*words, "run.name=r", kill_at(7, "forward"), cwd=tmp_path, ranks=2)
    runs = tmp_path / "runs"
    for rank in range(2):
        unbroken = (runs / f"u/draws/rank{rank}.jsonl").read_text().splitlines()
        resumed = (runs / f"r/draws/rank{rank}.jsonl").read_text().splitlines()
        assert resumed[-7:] == unbroken[-7:]
    assert_same(runs / "u", runs / "r", ranks=2)


def test_checkpoints_only_at_the_ends_of_epochs(tmp_path: Path) -> None:
    """`loader.position=epoch`: a finer interval is refused by both keys; a crash costs the epoch, no sample comes twice."""
    words = ("+recipe=job", data("Plain"), "trainer.max_steps=36", "loader.position=epoch", "run.name=r")
    refused = start(*words, cwd=tmp_path).ends(1)
    assert "callbacks.async_checkpoint.every=5steps" in refused.output()
    assert "loader.position=epoch" in refused.output()
    words = (*words, "callbacks.async_checkpoint.every=1epochs", part("Synchronous"))
    endure(*words, kill_at(20, "forward"), cwd=tmp_path)
    run = tmp_path / "runs/r"
    assert [event["step"] for event in events(run, "restored")] == [12]
    assert committed_steps(run) == [36, 24, 12] and once_per_epoch(run, 3)
    term = kill_at(6, "forward", number="SIGTERM")
    stopped = start(*words, term, "run.name=t", cwd=tmp_path).ends(143)
    assert "nothing is saved in the middle of epoch 0 (loader.position=epoch)" in stopped.output()
    assert committed_steps(tmp_path / "runs/t") == []


def test_the_length_of_a_stream_may_be_unknown_but_then_nothing_is_counted_in_epochs(tmp_path: Path) -> None:
    """Refused by key, or given by `loader.samples_per_epoch`."""
    words = ("+recipe=job", data("Plain", length="null"), "trainer.max_steps=24")
    assert "trainer.eval_every=1epochs is in epochs" in start(*words, "run.name=a", cwd=tmp_path).ends(1).output()
    start(*words, "run.name=b", "trainer.eval_every=12", cwd=tmp_path).ends(0)
    start(*words, "run.name=c", "loader.samples_per_epoch=96", cwd=tmp_path).ends(0)
    assert once_per_epoch(tmp_path / "runs/b", 2) and once_per_epoch(tmp_path / "runs/c", 2)


def test_other_numbers_of_workers_on_the_ranks_are_refused_with_the_numbers(tmp_path: Path) -> None:
    """A stream is split over ranks and workers, so they have to agree."""
    words = ("+recipe=job", data("Plain"), "trainer.max_steps=2", "trainer.global_batch_size=16", "run.name=r")
    run = start(*words, 'loader.num_workers="${oc.decode:${oc.env:WORKERS_${oc.env:RANK}}}"', cwd=tmp_path, ranks=2,
                env={"WORKERS_0": "1", "WORKERS_1": "2"})  # fmt: skip
    assert run.wait() == [1, 1]
    assert "different numbers of readers of Plain: [1, 2]" in run.output()
