"""Goodput predicted before a run, from rate, interval and measured costs alone, against what the run then has."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from interval_drill import stratified
from support import Run, events, start

from framework.goodput.planning.formulas import goodput
from framework.goodput.reporting.report import build

MTBF = 16.0
KILLS = 14
EVERY = 40  # steps
STEP_SECONDS = 0.03
WORDS = (
    "+recipe=toy", "run.name=r", "callbacks.mlflow=null", "callbacks.progress=null", "trainer.max_epochs=null",
    "trainer.max_steps=1000000", "trainer.eval_every=null", f"recipe.step_seconds={STEP_SECONDS}",
    f"callbacks.async_checkpoint.every={EVERY}",
)  # fmt: skip


class Victim:
    """A run of two ranks that is killed, whatever it does just then, and started again at once.

    Args:
        folder: Its own.
        lives: Seconds from each start to the kill.
    """

    def __init__(self, folder: Path, lives: Sequence[float]) -> None:
        folder.mkdir()
        self.path = folder / "runs" / "r"
        self._folder = folder
        self._lives = list(lives)
        self._run: Run | None = None
        self._end = 0.0

    def turn(self) -> bool:
        """Starts it, or kills it if its time has come; whether there is more to come."""
        if self._run is None:
            self._run, self._end = start(*WORDS, cwd=self._folder, ranks=2), time.monotonic() + self._lives.pop(0)
        elif time.monotonic() >= self._end:
            assert not self._run.codes, self._run.output()
            self._run.kill_all()
            self._run = None
        return self._run is not None or bool(self._lives)


def survive(victims: Sequence[Victim]) -> None:
    left = list(victims)
    while left:
        left = [one for one in left if one.turn()]
        time.sleep(0.005)


@dataclass(frozen=True, slots=True)
class Costs:
    """What was measured; seconds.

    Args:
        step: One step, and the wait for its data.
        working: The share of that without the wait.
        stall: A save holds the steps up.
        persist: From there until it is durable.
        restart: From a kill to the first step, with what the first steps take beyond the usual.
    """

    step: float
    working: float
    stall: float
    persist: float
    restart: float


def measured(path: Path) -> Costs:
    report = build(path)
    seconds, saves = report.goodput.seconds, events(path, "save_committed")
    inside = sum(seconds[name] for name in ("productive", "data_wait"))
    outside = sum(seconds[name] for name in ("init", "restore", "warmup", "detect", "down", "other"))
    steps = report.goodput.steps_done
    return Costs(
        inside / steps,
        seconds["productive"] / inside,
        statistics.mean(one["stall_seconds"] for one in saves),
        statistics.mean(one["persist_seconds"] for one in saves),
        outside / report.goodput.attempts,
    )


@pytest.mark.soak
@pytest.mark.timeout(1200)
def test_goodput_is_what_was_predicted(tmp_path: Path) -> None:
    # as many at once as later, and not all at the same moment: what a start costs depends on what else goes on here
    trials = [Victim(tmp_path / f"trial{n}", [MTBF * (0.5 + (n + 2 * k) % 5 / 4) for k in range(5)]) for n in range(3)]
    survive(trials)
    found = [measured(one.path) for one in trials]
    costs = Costs(*(statistics.mean(getattr(one, name) for one in found) for name in Costs.__slots__))
    print(f"\nmeasured before: {costs}")
    interval = EVERY * costs.step
    predicted = costs.working * goodput(interval, costs.stall, MTBF, costs.restart, costs.persist)
    victims = [Victim(tmp_path / f"seed{seed}", stratified(MTBF, KILLS, random.Random(seed))) for seed in range(3)]
    survive(victims)
    had = [build(one.path).goodput.ratio for one in victims]
    print(
        f"a failure every {MTBF:g} s, a save every {interval:.2f} s: {predicted:.1%} predicted; "
        + ", ".join(f"{one:.1%}" for one in had)
    )
    assert had == pytest.approx([predicted] * 3, abs=0.03)
