"""Failure rates, what a run's own failures make of them, and the formulas of saving, against published figures."""

from __future__ import annotations

import math
import random
from itertools import count

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from framework.errors import ConfigError
from framework.goodput.planning.formulas import daly, goodput
from framework.goodput.planning.rates import PRESETS, blend, mean_hours, parse_rate


@pytest.mark.parametrize(
    ("text", "hours"),
    [
        ("llama3", 45_566), ("RSC1", 29_538), ("delta", 1_155.2), ("1%/yr", 876_000), (" 2.5 % / year", 350_400),
        ("876000", 876_000), (1000, 1000), (0.5, 0.5), ("1e3", 1000),
    ],
)  # fmt: skip
def test_a_rate_is_a_preset_a_share_per_year_or_hours(text: str | float, hours: float) -> None:
    rate = parse_rate(text)
    assert rate.gpu_hours == pytest.approx(hours, rel=1e-4) and rate.source


@pytest.mark.parametrize("text", ["llama", "", "-3", "0", "0%/yr", "inf", "nan", True, "often", "3%/day"])
def test_what_is_no_rate_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="is no failure rate"):
        parse_rate(text)


def test_a_misspelt_preset_is_told() -> None:
    with pytest.raises(ConfigError, match="Did you mean 'llama3'"):
        parse_rate("lama3")


def test_no_failure_is_no_proof_and_one_does_not_halve_the_interval() -> None:
    rate = PRESETS["delta"]
    assert mean_hours(rate, 0, 0.0) == rate.gpu_hours
    assert mean_hours(rate, 0, 3 * rate.gpu_hours) == 4 * rate.gpu_hours
    assert mean_hours(rate, 1, 0.0) == rate.gpu_hours / 2  # the optimum goes with the square root


@pytest.mark.parametrize(
    ("failures", "low", "high"), [(0, 0.0513, 2.9957), (1, 0.3554, 4.7439), (4, 1.9701, 9.1535), (99, 84.1395, 116.9971), (199, 177.3205, 223.8162)],
)  # fmt: skip
def test_the_interval_is_that_of_the_gamma_distribution(failures: int, low: float, high: float) -> None:
    """Quantiles 5 % and 95 % from tables of chi-square with 2 (failures + 1) degrees of freedom, halved."""
    found = blend(parse_rate(100.0), failures, 900.0)
    assert 1000 / found.high == pytest.approx(low, rel=1e-3) and 1000 / found.low == pytest.approx(high, rel=1e-3)
    assert found.low < found.gpu_hours < found.high


@settings(deadline=None)
@given(st.integers(0, 3000), st.floats(0, 1e9))
def test_the_interval_holds_the_estimate_for_any_number_of_failures(failures: int, hours: float) -> None:
    found = blend(PRESETS["llama3"], failures, hours)
    assert 0 < found.low < found.gpu_hours < found.high < math.inf


@pytest.mark.parametrize(("mtbf", "optimum"), [(24 * 60, 116.7), (6 * 60, 56.7), (15, 9.14)])
def test_dalys_published_optima(mtbf: float, optimum: float) -> None:
    """Minutes; a save takes 5."""
    assert daly(5, mtbf) == pytest.approx(optimum, rel=1e-3)
    assert daly(3 * mtbf, mtbf) == mtbf


@pytest.mark.parametrize(("hours", "share"), [(2.0, 0.683), (0.5, 0.913)])
def test_goodput_of_466_interruptions_in_54_days(hours: float, share: float) -> None:
    assert goodput(hours, 0.0, 54 * 24 / 466) == pytest.approx(share, abs=5e-4)


@pytest.mark.parametrize(("persist", "share"), [(0, 0.829), (2, 0.815), (10, 0.759), (20, 0.695)])
def test_goodput_where_saves_become_durable_later(persist: float, share: float) -> None:
    """Minutes; an interval of 20, a stall of 0.2, a failure every 114: simulated."""
    assert goodput(20, 0.2, 114, persist=persist) / goodput(20, 0.2, 114) == pytest.approx(share / 0.829, abs=2e-3)


@settings(deadline=None)
@given(st.floats(1e-3, 1e3), st.floats(0.01, 0.5))
def test_dalys_optimum_is_where_goodput_is_largest(mtbf: float, share: float) -> None:
    stall = share * mtbf
    best = goodput(daly(stall, mtbf), stall, mtbf)
    grid = [goodput(daly(stall, mtbf) * 1.02**n, stall, mtbf) for n in range(-50, 51)]
    assert best >= max(grid) * (1 - 1e-4)


def test_goodput_is_what_a_simulation_gives() -> None:
    chance, interval, stall, mtbf, restart, persist = random.Random(1), 30.0, 2.0, 100.0, 10.0, 5.0
    kept = total = 0.0
    for _ in range(20_000):
        life = chance.expovariate(1 / mtbf)
        total += life
        saves = next(n for n in count() if restart + (n + 1) * (interval + stall) + persist > life)
        kept += saves * interval
    assert goodput(interval, stall, mtbf, restart, persist) == pytest.approx(kept / total, abs=0.01)


def test_where_no_save_is_ever_reached_nothing_is_kept() -> None:
    assert goodput(1e9, 1.0, 1.0) == 0.0
