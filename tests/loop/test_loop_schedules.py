"""Schedules are pure functions of the step, and end where they say."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest

from framework.errors import ConfigError
from framework.schedules import Horizon, constant, cosine, linear, wsd

RUN = Horizon(total_steps=20, num_samples=30, global_batch_size=8)
DECAYING = {
    "linear": linear,
    "cosine": cosine,
    "wsd": lambda horizon, **options: wsd(horizon, **{"decay": 5, **options}),
}


@pytest.mark.parametrize("name", DECAYING)
@pytest.mark.parametrize("warmup", [None, 4, "1epochs"])
def test_the_first_step_is_warm_and_the_last_reaches_the_final_factor(name: str, warmup: Any) -> None:
    factor = DECAYING[name](RUN, warmup=warmup, final=0.1)
    steps = {None: 0, 4: 4, "1epochs": 4}[warmup]  # 30 samples are 4 steps of 8, rounded up
    assert factor(0) == pytest.approx(1.0 if not steps else 1 / (steps + 1))
    assert factor(steps) == pytest.approx(1.0)
    assert factor(19) == pytest.approx(0.1) and factor(18) > 0.1
    assert factor(1000) == pytest.approx(0.1)
    decay = [factor(step) for step in range(steps, 20)]
    assert decay == sorted(decay, reverse=True)


def test_each_has_its_shape() -> None:
    assert [constant(RUN)(step) for step in (0, 5, 500)] == [1.0, 1.0, 1.0]
    assert [constant(RUN, warmup=3)(step) for step in range(5)] == [0.25, 0.5, 0.75, 1.0, 1.0]
    line = linear(RUN)
    assert [line(step) for step in range(20)] == pytest.approx([1 - step / 19 for step in range(20)])
    curve = cosine(RUN, final=0.2)
    expected = [0.2 + 0.8 * (1 + math.cos(math.pi * step / 19)) / 2 for step in range(20)]
    assert [curve(step) for step in range(20)] == pytest.approx(expected)
    stable = wsd(RUN, decay=5)
    assert [stable(step) for step in range(20)] == pytest.approx([1.0] * 15 + [0.8, 0.6, 0.4, 0.2, 0.0])


@pytest.mark.parametrize("make", [constant, *DECAYING.values()])
def test_the_factor_of_a_step_does_not_depend_on_what_was_asked_before(make: Callable[..., Any]) -> None:
    forwards, backwards = make(RUN, warmup=3), make(RUN, warmup=3)
    assert [forwards(step) for step in range(20)] == [backwards(step) for step in reversed(range(20))][::-1]


@pytest.mark.parametrize("name", DECAYING)
def test_a_run_that_only_a_time_bounds_refuses_a_schedule_with_an_end(name: str) -> None:
    endless = Horizon(None, 30, 8)
    with pytest.raises(ConfigError, match=rf"schedule={name} needs the number of steps.*trainer\.max_time"):
        DECAYING[name](endless)
    assert constant(endless)(10**9) == 1.0


def test_lengths_that_have_no_meaning_are_refused_with_their_key() -> None:
    with pytest.raises(ConfigError, match=r"schedule\.warmup='5min'"):
        cosine(RUN, warmup="5min")
    with pytest.raises(ConfigError, match=r"schedule\.warmup \(16 steps\).*schedule\.decay \(8 steps\).*\(20 steps\)"):
        wsd(RUN, warmup=16, decay="2epochs")
    with pytest.raises(ConfigError, match=r"schedule\.warmup=-1"):
        constant(RUN, warmup=-1)


def test_a_warm_up_longer_than_the_run_never_reaches_the_full_rate() -> None:
    factor = cosine(RUN, warmup=40)
    assert [factor(step) for step in range(20)] == pytest.approx([(step + 1) / 41 for step in range(20)])
