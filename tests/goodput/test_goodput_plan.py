"""The planner reproduces what was published, says what it used, and refuses what makes no sense."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from framework.goodput.__main__ import main
from framework.goodput.planning import formulas
from framework.goodput.planning.plan import Costs, Plan
from framework.goodput.planning.rates import PRESETS, parse_rate

MINUTE, HOUR, DAY = 60.0, 3600.0, 86_400.0
FREE = Costs(0.0, 0.0, 0.0)
LLAMA = Plan(16_384, 54, PRESETS["llama3"], FREE)


@pytest.mark.parametrize(("gpus", "percent"), [(256, 19), (1024, 57)])
def test_one_percent_a_year_for_thirty_days(gpus: int, percent: int) -> None:
    plan = Plan(gpus, 30, parse_rate("1%/yr"), FREE)
    assert round(100 * (1 - plan.survival)) == percent


@pytest.mark.parametrize(("interval", "first_order", "exact"), [(2 * HOUR, 64, 68.3), (HOUR / 2, 91, 91.3)])
def test_466_interruptions_in_54_days(interval: float, first_order: int, exact: float) -> None:
    assert LLAMA.failures_per_day * 54 == pytest.approx(466)
    outlook = LLAMA.at(interval)
    assert round(100 * outlook.first_order) == first_order
    assert round(100 * outlook.goodput, 1) == exact


@pytest.mark.parametrize(("interval", "hours"), [(2 * HOUR, 8.6), (HOUR / 2, 2.15)])
def test_interruptions_cost_hours_a_day(interval: float, hours: float) -> None:
    plan = Plan(1, 1, parse_rate(24 / 8.6), FREE)
    assert plan.at(interval).lost_hours_per_day == pytest.approx(hours)


def test_a_failure_every_19_hours_on_608_gpus_is_one_in_36_hours_on_32() -> None:
    assert Plan(608, 1, PRESETS["delta"], FREE).mtbf / HOUR == pytest.approx(1.9)
    assert round(Plan(32, 1, PRESETS["delta"], FREE).mtbf / HOUR) == 36


def test_one_save_a_day_loses_half_a_day_and_ten_a_tenth_of_it() -> None:
    assert formulas.mean_loss(DAY) == 12 * HOUR
    assert LLAMA.at(DAY / 10).lost_hours_per_day == pytest.approx(LLAMA.at(DAY).lost_hours_per_day / 10)
    assert formulas.mean_loss(DAY, persist=120) == 12 * HOUR + 120


@pytest.mark.parametrize(("mtbf", "published"), [(24 * HOUR, 117), (6 * HOUR, 57), (HOUR / 4, 9.1)])
def test_dalys_published_optima(mtbf: float, published: float) -> None:
    """Minutes, for saves of 5 minutes: Daly (2006)."""
    digits = 1 if published < 10 else 0
    assert round(formulas.daly(5 * MINUTE, mtbf) / MINUTE, digits) == published
    assert formulas.optimum(5 * MINUTE, mtbf) == pytest.approx(formulas.daly(5 * MINUTE, mtbf), rel=0.006)


@pytest.mark.parametrize("mtbf", [15 * MINUTE, 2 * HOUR, 100 * HOUR])
@pytest.mark.parametrize("stall", [0.5, 15.0, 120.0])
def test_the_optimum_is_where_goodput_is_greatest(stall: float, mtbf: float) -> None:
    best = formulas.optimum(stall, mtbf)
    top = formulas.goodput(best, stall, mtbf, 600.0)
    assert all(formulas.goodput(best * factor, stall, mtbf, 600.0) < top for factor in (0.5, 0.9, 1.1, 2.0))
    assert formulas.young(stall, mtbf) == pytest.approx(best, rel=0.35)


def test_no_interval_below_the_persist_time() -> None:
    assert Plan(16_384, 54, PRESETS["llama3"], Costs(0.1, 900.0, 60.0)).best.interval == 900.0
    assert Plan(16_384, 54, PRESETS["llama3"], FREE).best.interval == 1.0


def planned(*options: str, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    assert main(["plan", *options, "--json"]) == 0
    values: dict[str, Any] = json.loads(capsys.readouterr().out)
    return values


def test_json_has_what_the_words_say(capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--gpus", "16,384", "--rate", "llama3", "--interval", "30min", "--price", "2.5", "--restart", "10min")
    values = planned(*options, capsys=capsys)
    assert values["chosen"]["interval_seconds"] == 1800
    assert values["restart_seconds"] == 600
    wasted = values["chosen"]["gpu_hours_wasted"]
    assert wasted == pytest.approx((1 - values["chosen"]["goodput"]) * 16_384 * 54 * 24)
    assert values["chosen"]["price_wasted"] == pytest.approx(2.5 * wasted)
    assert values["best"]["goodput"] > values["chosen"]["goodput"]
    assert 16_384 in [row["gpus"] for row in values["grid"]]
    assert main(["plan", *options]) == 0
    shown = capsys.readouterr().out
    assert f"goodput {values['chosen']['goodput']:.1%} (first-order {values['chosen']['first_order']:.1%})" in shown
    assert f"goodput {values['best']['goodput']:.1%}" in shown
    assert "466 interruptions in 54 days" in shown, "the source of the rate"
    assert "exact for Poisson failures" in shown
    assert "first-order: 1 - t / 2M" in shown


@pytest.mark.parametrize(
    ("options", "word"),
    [
        (["--gpus", "0"], "--gpus=0"),
        (["--gpus", "1.5"], "--gpus=1.5"),
        (["--gpus", "many"], "--gpus=many"),
        (["--gpus", "8", "--rate", "lama3"], "llama3"),
        (["--gpus", "8", "--interval", "0"], "--interval=0"),
        (["--gpus", "8", "--interval", "5 epochs"], "--interval"),
        (["--gpus", "8", "--stall", "nan"], "--stall"),
        (["--gpus", "8", "--price", "inf"], "--price"),
        (["--gpus", "8", "--days", "-1"], "--days=-1"),
        (["--gpus", "8", "--png", "/no/such/folder/plan.png"], "/no/such/folder/plan.png"),
    ],
)
def test_what_makes_no_sense_is_one_line(options: list[str], word: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *options]) == 1
    told = capsys.readouterr().err
    assert word in told
    assert told.count("\n") == 1


def test_pictures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    png, page = tmp_path / "plan.png", tmp_path / "plan.html"
    assert main(["plan", "--gpus", "1000", "--rate", "1%/yr", "--png", str(png), "--html", str(page)]) == 0
    assert png.read_bytes().startswith(b"\x89PNG")
    text = page.read_text()
    assert "<svg" in text
    assert "1,000 GPUs" in text
    assert "default-src 'none'" in text
    assert "<script" not in text


def test_rates_far_apart_do_not_break_it(capsys: pytest.CaptureFixture[str]) -> None:
    for rate in ("1e-3", "1e12", "delta"):
        values = planned("--gpus", "100000", "--rate", rate, capsys=capsys)
        assert 0 <= values["best"]["goodput"] <= 1
        assert math.isfinite(values["mtbf_seconds"])
