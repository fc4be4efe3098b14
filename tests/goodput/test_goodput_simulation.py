"""The simulation agrees with the closed forms where there are some, and moves the right way where there are none."""

from __future__ import annotations

import itertools
import json
from dataclasses import asdict, replace
from typing import Any

import pytest

from framework.goodput.__main__ import main
from framework.goodput.planning.formulas import goodput
from framework.goodput.planning.simulation import DAY, HOUR, Outcome, Scenario, runs, simulate, spread

MINUTE = 60.0
JOB = Scenario(
    gpus=16_384, gpu_hours=45_566, interval=600.0, stall=15.0, persist=120.0, restart=600.0, length=540 * DAY
)
# intervals, stalls and restarts as shares of the mean time between failures: 60 settings
GRID = list(itertools.product((0.02, 0.05, 0.1, 0.2, 0.35), (0.0, 0.005, 0.02, 0.05), (0.0, 0.05, 0.2)))
FAILURES = 30_000  # standard error of a share: about 0.2 points at worst


@pytest.mark.timeout(300)
def test_sixty_settings_agree_with_the_formula_within_half_a_point() -> None:
    assert len(GRID) == 60
    mtbf = 10_000.0
    for number, (interval, stall, restart) in enumerate(GRID):
        scenario = Scenario(
            1, mtbf / HOUR, interval * mtbf, stall * mtbf, restart=restart * mtbf, length=FAILURES * mtbf
        )
        share = simulate(scenario, number).goodput
        exact = goodput(scenario.interval, scenario.stall, mtbf, scenario.restart)
        assert share == pytest.approx(exact, abs=0.005), f"{interval=} {stall=} {restart=}"


def test_late_durability_agrees_with_the_formula() -> None:
    for persist in (60.0, 300.0, 600.0):
        scenario = replace(JOB, persist=persist, length=10_000 * JOB.mtbf)
        exact = goodput(scenario.interval, scenario.stall, scenario.mtbf, scenario.restart, persist)
        assert simulate(scenario).goodput == pytest.approx(exact, abs=0.005)


def sums_up(one: Outcome) -> bool:
    parts = one.productive + one.lost + one.smaller + one.stall + one.restart + one.wait
    return parts == pytest.approx(one.wall, rel=1e-9)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"slow_share": 0.3, "slow_factor": 10.0},
        {"wave_every": DAY, "wave_length": HOUR},
        {"repair": 2 * DAY, "spares": 4},
        {"repair": DAY, "is_elastic": True},
        {"repair": DAY, "is_elastic": True, "spares": 2, "wave_every": DAY, "fast_every": MINUTE, "fast_stall": 0.5},
        {"gpus": 16, "gpu_hours": 10.0, "repair": DAY, "is_elastic": True},
    ],
)
def test_every_second_is_in_one_part_and_a_seed_repeats_it(changes: dict[str, Any]) -> None:
    scenario = replace(JOB, length=54 * DAY, **changes)
    for seed in range(5):
        one = simulate(scenario, seed)
        assert sums_up(one)
        assert min(one.productive, one.lost, one.smaller, one.stall, one.restart, one.wait) >= 0
        assert asdict(simulate(scenario, seed)) == asdict(one)
        assert one.wall >= scenario.length


def mean(scenario: Scenario) -> float:
    return spread(runs(scenario, 3))[0]


def test_slow_saves_cost() -> None:
    slow = replace(JOB, slow_share=0.5, slow_factor=20.0)
    assert mean(slow) < mean(JOB) - 0.01
    assert simulate(slow).skipped > 0
    assert simulate(JOB).skipped == 0


def test_announced_waves_cost_their_length_and_no_work() -> None:
    calm = Scenario(1, 1e12, 600.0, 0.0, restart=600.0, length=3000 * DAY)
    waves = replace(calm, wave_every=10 * HOUR, wave_length=HOUR)
    one = simulate(waves)
    assert one.lost == 0
    assert one.goodput == pytest.approx(10 * HOUR / (10 * HOUR + HOUR + 600), abs=0.005)


def test_a_job_that_never_gets_up_again_comes_to_an_end() -> None:
    one = simulate(Scenario(1, 1.0 / 3600, 60.0, restart=600.0, length=3600.0))
    assert one.goodput == 0
    assert one.failures > 1000


def test_spares_spare_the_wait() -> None:
    none, few, many = (replace(JOB, repair=2 * DAY, spares=count) for count in (0, 10, 40))
    assert mean(none) < mean(few) < mean(many)
    assert mean(many) == pytest.approx(mean(JOB), abs=0.005)
    assert simulate(many).wait == pytest.approx(0, abs=1)


def test_going_on_smaller_beats_waiting() -> None:
    waiting = replace(JOB, repair=DAY)
    smaller = replace(waiting, is_elastic=True)
    assert mean(smaller) > mean(waiting) + 0.2
    one = simulate(smaller)
    assert one.wait == 0
    expected = 8.6 * 8 / 16_384  # nodes of 8 in repair at any time, one a failure and a day each
    assert one.smaller / one.wall == pytest.approx(expected, rel=0.3)


def test_saves_in_memory_help_as_far_as_they_survive() -> None:
    seldom = replace(JOB, interval=2 * HOUR)
    half, all_ = (
        replace(seldom, length=108 * DAY, fast_every=MINUTE, fast_stall=0.0, fast_share=share) for share in (0.5, 1.0)
    )
    assert mean(seldom) < mean(half) < mean(all_)
    # all survived: as good as saving every minute for nothing
    ideal = goodput(MINUTE, 0.0, JOB.mtbf, JOB.restart) * 2 * HOUR / (2 * HOUR + JOB.stall)
    assert mean(all_) == pytest.approx(ideal, abs=0.006)


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "--gpus", "16384", "--interval", "10min", "--json"]) == 0
    values = json.loads(capsys.readouterr().out)
    assert values["goodput"] == pytest.approx(values["formula"], abs=0.015)
    assert sum(values["shares"].values()) == pytest.approx(1.0)
    assert len(values["runs"]) == 5
    assert main(["simulate", "--gpus", "1024", "--repair", "1d", "--elastic", "--wave-every", "5d"]) == 0
    assert "closed form" in capsys.readouterr().out
    assert main(["simulate", "--gpus", "8", "--slow-share", "2"]) == 1
    assert "--slow-share=2 is a share" in capsys.readouterr().err
