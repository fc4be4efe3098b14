"""A request of one rank takes effect on all ranks after the same step."""

from __future__ import annotations

import time
from pathlib import Path

from framework.callback import Callback
from framework.distributed import Group, World
from framework.errors import EXIT_SIGTERM
from framework.loop.control import Control, Requests
from framework.trainer import Trainer
from tests.loop.ranks import in_ranks
from tests.loop.runs import Ask, Fit, Points, core, events, fit, make, saved_steps
from tests.loop.test_loop_window import SOLO


def test_one_rank_takes_a_request_at_once_and_once() -> None:
    control = Control(Group(SOLO, timeout_seconds=5, name="control"))
    assert control.agreed(1) is None
    control.save("now")
    control.eval("now too")
    assert control.agreed(2) == Requests(save="now", eval="now too")
    assert control.agreed(3) is None


def test_the_first_reason_and_the_larger_exit_code_win() -> None:
    control = Control(Group(SOLO, timeout_seconds=5, name="control"))
    control.stop("first")
    control.stop("second", EXIT_SIGTERM)
    assert control.stop_requested_here
    assert control.agreed(1) == Requests(stop="first", exit_code=EXIT_SIGTERM)
    assert not control.stop_requested_here


def ask_on_rank_1(world: World) -> list[tuple[int, Requests]]:
    """Steps at which this rank, faster than the other or slower, was told of requests."""
    control = Control(Group(world, timeout_seconds=30, name="control"))
    told = []
    for step in range(1, 5001):
        time.sleep(0.0005 if world.rank else 0.001)
        if world.rank == 1 and step == 20:
            control.save("rank 1 wants it")
        if world.rank == 0 and step == 20:
            control.rollback("rank 0 wants it")
        if world.rank == 1 and step == 200:
            control.stop("rank 1 has enough", EXIT_SIGTERM)
        requests = control.agreed(step)
        if requests is not None:
            told.append((step, requests))
            if requests.stop:
                break
    control.close()
    return told


def test_ranks_of_unequal_pace_are_told_at_the_same_step() -> None:
    zero, one = in_ranks(2, ask_on_rank_1)
    assert [step for step, _ in zero] == [step for step, _ in one]
    for kind, reason, told in (("save", "rank 1 wants it", one), ("rollback", "rank 0 wants it", zero)):
        assert [getattr(r, kind) for _, r in told if getattr(r, kind)] == [reason]
    for kind, told in (("save", zero), ("rollback", one), ("stop", zero)):
        assert [getattr(r, kind) for _, r in told if getattr(r, kind)] == ["requested by another rank"]
    assert [r.exit_code for _, r in zero if r.stop] == [r.exit_code for _, r in one if r.stop] == [EXIT_SIGTERM]
    assert all(step > 200 for step, r in one if r.stop)


def stop_from_rank_1(world: World, folder: str) -> tuple[int, int, str]:
    ask = {"ask": Ask(5, "stop", "rank 1 has enough", EXIT_SIGTERM)} if world.rank else {"ask": Ask(0, "stop")}
    trainer = make(Path(folder), Fit(), core(every=None, **ask), max_steps=5000)
    code = trainer.fit()
    return code, trainer.progress.step, trainer.stop.stop


def test_a_stop_on_one_rank_ends_the_run_on_all_with_one_checkpoint(tmp_path: Path) -> None:
    zero, one = in_ranks(2, stop_from_rank_1, str(tmp_path))
    assert zero[:2] == one[:2] and zero[0] == EXIT_SIGTERM and 5 <= zero[1] < 5000
    assert (zero[2], one[2]) == ("requested by another rank", "rank 1 has enough")
    assert saved_steps(tmp_path) == [zero[1]]


def test_what_a_callback_asks_for_happens_after_that_step(tmp_path: Path) -> None:
    asked = {"save": Ask(3, "save", "I like it"), "look": Ask(5, "eval"), "end": Ask(7, "stop", "enough")}
    trainer = fit(tmp_path, Fit(eval_data=lambda: Points(8)), core(every=None, **asked))
    assert trainer.progress.step == 7
    assert [(e["step"], e["reason"]) for e in events(tmp_path, "save_start")] == [(3, "I like it"), (7, "enough")]
    assert [event["step"] for event in events(tmp_path, "metrics")] == [5]
    (end,) = events(tmp_path, "end")
    assert (end["status"], end["exit_code"], end["step"], end["reason"]) == ("finished", 0, 7, "enough")


def test_a_stop_before_the_first_step_takes_none(tmp_path: Path) -> None:
    class Early(Callback):
        def train_start(self, trainer: Trainer, resumed: bool) -> None:
            trainer.request_stop("not today", EXIT_SIGTERM)

    trainer = make(tmp_path, Fit(), core(early=Early()))
    assert trainer.fit() == EXIT_SIGTERM and trainer.progress.step == 0
