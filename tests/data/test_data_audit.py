"""What the audit proves, and what it finds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from framework.data.__main__ import main
from framework.data.audit.check import Where, audit
from framework.data.audit.log import AuditLog, log_path, read_log
from framework.data.receipt import Receipt
from framework.errors import DataError

SAMPLES, BATCH = 12, 4


def receipt(positions: list[int], replaced: dict[int, tuple[int, str]] | None = None, ids: Any = None) -> Receipt:
    at = np.array(positions, dtype=np.int64)
    return Receipt(at // SAMPLES, at % SAMPLES if ids is None else np.array(ids, dtype=np.int64), replaced or {})


class Run:
    """Attempts that log what a run would: every rank takes its share of each step."""

    def __init__(self, folder: Path, **facts: Any) -> None:
        self.events = folder / "events"
        self.facts = {"strategy": "offset", "epoch_end": "carry", "global_batch": BATCH, "starts": [0]} | facts
        self.attempt = 0

    def begin(self, step: int, world: int = 2) -> list[AuditLog]:
        self.attempt += 1
        return [
            AuditLog(
                log_path(self.events, self.attempt, rank),
                {"attempt": self.attempt, "rank": rank, "world": world, "step": step, "samples": SAMPLES, **self.facts},
            )
            for rank in range(world)
        ]

    def train(self, logs: list[AuditLog], first: int, last: int) -> None:
        for step in range(first, last + 1):
            positions = list(range((step - 1) * BATCH, step * BATCH))
            for rank, log in enumerate(logs):
                log.trained(step, [receipt(positions[rank :: len(logs)])])

    def whole(self) -> Any:
        return audit(self.events)


def test_a_run_that_was_killed_and_changed_its_shape_is_clean(tmp_path: Path) -> None:
    run = Run(tmp_path)
    logs = run.begin(0)
    run.train(logs, 1, 5)
    logs[0].trained(6, [receipt([20, 22])])  # killed before the other rank
    run.train(run.begin(3, world=4), 4, 4)  # from the checkpoint of step 3
    run.train(run.begin(4, world=1), 5, 7)
    result = run.whole()
    assert result.is_clean
    assert (result.steps, result.attempts, result.taken_back) == (7, 3, 5)
    assert [(each.trained, each.is_over) for each in result.epochs] == [(12, True), (12, True), (4, False)]


def test_a_step_that_was_trained_twice_is_found_with_its_places(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.train(run.begin(0), 1, 3)
    logs = run.begin(3)
    logs[0].trained(4, [receipt([0, 13])])
    logs[1].trained(4, [receipt([14, 15])])
    result = run.whole()
    assert not result.is_clean
    assert result.epochs[0].repeated == {0: [Where(1, 0, 1), Where(2, 0, 4)]}


def test_what_was_never_trained_is_found_in_an_epoch_that_is_over(tmp_path: Path) -> None:
    run = Run(tmp_path)
    logs = run.begin(0, world=1)
    logs[0].trained(1, [receipt(list(range(0, 6))), receipt(list(range(8, 10)))])
    logs[0].trained(2, [receipt(list(range(12, 16)))])
    result = run.whole()
    assert result.epochs[0].missing == [6, 7, 10, 11]
    assert result.epochs[1].missing == []
    assert not result.is_clean


def test_a_rollback_takes_steps_back(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.train(run.begin(0), 1, 2)
    logs = run.begin(2)
    run.train(logs, 3, 5)
    for log in logs:
        log.left_out(5)
        log.back(1)
    run.train(logs, 2, 3)
    result = run.whole()
    assert result.is_clean
    assert (result.steps, result.left_out) == (3, [])
    assert [(each.trained, each.is_over) for each in result.epochs] == [(12, True)]


def test_damaged_samples_and_what_took_their_place_are_no_repeats(tmp_path: Path) -> None:
    run = Run(tmp_path)
    logs = run.begin(0, world=1)
    logs[0].trained(1, [receipt([0, 1]), receipt([2, 3], {1: (3, "cut off")}, ids=[2, 2])])
    logs[0].trained(2, [receipt(list(range(4, 8)))])
    logs[0].trained(3, [receipt(list(range(8, 12)))])
    result = run.whole()
    assert result.is_clean
    assert (result.epochs[0].damaged, result.epochs[0].trained) == ([3], 11)


def test_what_an_epoch_drops_is_no_loss_but_more_than_that_is(tmp_path: Path) -> None:
    for number, (end, clean) in enumerate(((9, True), (8, False))):
        run = Run(tmp_path / str(number), epoch_end="drop")
        logs = run.begin(0, world=1)
        logs[0].trained(1, [receipt(list(range(end)))])
        logs[0].trained(2, [receipt(list(range(12, 16)))])
        assert run.whole().is_clean is clean


def test_the_datasets_of_a_mix_have_epochs_of_their_own(tmp_path: Path) -> None:
    run = Run(tmp_path, starts=[0, 4, 12])
    logs = run.begin(0, world=1)
    small = Receipt(np.repeat(np.arange(3), 4), np.tile(np.arange(4), 3))
    large = Receipt(np.zeros(6, np.int64), np.arange(4, 10))
    logs[0].trained(1, [small, large])
    result = run.whole()
    assert result.is_clean
    assert [(each.dataset, each.trained, each.is_over) for each in result.epochs] == [
        (0, 4, True), (0, 4, True), (0, 4, True), (1, 6, False)
    ]  # fmt: skip


def test_holes_are_not_passed_over(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.train(run.begin(0), 1, 2)
    run.train(run.begin(3), 4, 6)
    assert run.whole().gaps == ["steps 3 to 3 are in no log: the audit was off, or logs were removed"]
    log_path(run.events, 2, 1).unlink()
    assert "attempt 2: the log of rank 1 is not there" in run.whole().gaps


@pytest.mark.parametrize("cut", [1, 7, 12, 40, 90])
def test_a_torn_end_is_dropped(tmp_path: Path, cut: int) -> None:
    run = Run(tmp_path)
    run.train(run.begin(0, world=1), 1, 3)
    path = log_path(run.events, 1, 0)
    whole = list(read_log(path))
    path.write_bytes(path.read_bytes()[:-cut])
    assert [kind for kind, _ in read_log(path)] == [kind for kind, _ in whole[: len(list(read_log(path)))]]
    assert len(list(read_log(path))) < len(whole)


def test_a_flipped_byte_is_damage(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.train(run.begin(0, world=1), 1, 3)
    path = log_path(run.events, 1, 0)
    data = bytearray(path.read_bytes())
    data[-40] ^= 1
    path.write_bytes(data)
    with pytest.raises(DataError, match=r"rank0\.audit is damaged at byte \d+"):
        run.whole()


def test_large_ids_and_epochs_come_back(tmp_path: Path) -> None:
    run = Run(tmp_path)
    log = run.begin(0, world=1)[0]
    made = Receipt(np.array([7, 7, 8]), np.array([5, 10**10, 0]), {2: (10**10 + 1, "gone")})
    log.trained(10**12, [made, Receipt(np.empty(0, np.int64), np.empty(0, np.int64)), made])
    _, (_, trained) = read_log(log.path)
    assert trained.step == 10**12
    assert trained.epochs.tolist() == [7, 7, 8] * 2
    assert trained.ids.tolist() == [5, 10**10, 0] * 2
    assert trained.replaced == {2: 10**10 + 1, 5: 10**10 + 1}


def test_a_log_of_something_else_is_refused(tmp_path: Path) -> None:
    log = AuditLog(tmp_path / "att-0001" / "rank0.audit", {"attempt": 1})
    with pytest.raises(DataError, match="damaged at byte 8: 'rank'"):
        list(read_log(log.path))
    log.path.write_bytes(b"no log at all")
    with pytest.raises(DataError, match="no audit log of this version"):
        audit(tmp_path)


def test_the_command_says_it_in_words_and_by_its_exit_code(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = Run(tmp_path)
    run.train(run.begin(0), 1, 3)
    assert main(["audit", str(tmp_path)]) == 0
    assert "epoch 0: 12 of 12 samples, each once" in capsys.readouterr().out
    run.begin(3)[0].trained(4, [receipt([0])])
    log_path(run.events, 2, 1).unlink()
    assert main(["audit", str(tmp_path), "--json"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert (told["clean"], told["attempts"]) == (False, 2)
    assert main(["audit", str(tmp_path / "nothing")]) != 0
    (tmp_path / "empty").mkdir()
    assert main(["audit", str(tmp_path / "empty")]) != 0
    assert "callbacks.data_position.audit=true" in capsys.readouterr().err
