"""A training on a clock that the test turns: saves, stalls and failures, and an attempt after each of them."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from goodput_story import Story

from framework.goodput.planning.interval import AutoInterval
from framework.goodput.planning.observed import Observed, observe
from framework.goodput.planning.rates import Rate

RESTART_SECONDS = 5.0


def stratified(mean: float, count: int, chance: random.Random) -> list[float]:
    """Times between failures in random order: the middles of equally likely parts of the exponential distribution.

    So few of them stand for all only if none is drawn by luck. Their mean is the one asked for.
    """
    times = [-math.log(1 - (number + 0.5) / count) for number in range(count)]
    chance.shuffle(times)
    return [mean * count / sum(times) * one for one in times]


@dataclass(frozen=True, slots=True)
class Drilled:
    """How a drill went.

    Args:
        goodput: Share of the training time that was kept.
        seconds: The interval in force at the end.
        changes: How often it changed within an attempt.
        seen: What was observed, at the end.
    """

    goodput: float
    seconds: float
    changes: int
    seen: Observed


def drill(
    lives: Sequence[float], stall: float, persist: float, *, fixed: float | None = None, rate: Rate | None = None,
    noise: float = 0.2, seed: int = 0,
) -> Drilled:  # fmt: skip
    """Trains until the last failure.

    Args:
        lives: Training time of each attempt, in seconds; then it is killed.
        stall: What a save holds the steps up for, in seconds, on average.
        persist: How long it takes to become durable then, on average.
        fixed: The interval; none for `auto`.
        rate: What `auto` believes before it saw a failure.
        noise: By how much what a save costs varies, as a share.
        seed: Of that.
    """
    chance = random.Random(seed)
    seen, kept, seconds, changes = Observed(), 0.0, fixed or 0.0, 0
    known: list[dict[str, Any]] = []  # the journal of the newest attempt: it has what came before in it
    story = Story()
    for life in lives:
        story.start(init=RESTART_SECONDS)
        seen = observe(event for event in known)
        story.events.clear()
        story.event("train_start", step=0)
        began, end = story.wall, story.wall + life
        auto = None if rate is None else AutoInterval(rate, 1, seen, story.monotonic)
        if auto is not None:
            seconds = auto.seconds
            story.event("interval", **auto.change.to_json())
        since, trained, stalled = began, 0.0, 0.0
        while True:
            costs = [max(0.01, chance.gauss(1, noise)) * one for one in (stall, persist)]
            begin = since + seconds
            committed = begin + sum(costs)
            if committed > end:
                break
            stalled_before, stalled = stalled, stalled + costs[0]
            trained = begin - began - stalled_before
            story.wait(committed - story.wall)
            story.event("save_committed", stall_seconds=costs[0], persist_seconds=costs[1], step=1)
            change = None if auto is None else auto.committed(*costs, story.monotonic)
            if change is not None:
                story.event("interval", **change.to_json())
                seconds, changes = change.choice.seconds, changes + 1
            since = max(begin, committed - seconds)
        story.wait(end - story.wall).event("steps", first=1)
        kept += trained
        known = list(story.events)
    return Drilled(kept / sum(lives), seconds, changes, observe(known))
