"""What is kept: decided from what is on disk, and never nothing."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from framework.checkpoint import Found, Manifest
from framework.checkpoint.retention import Keep, expendable, is_good, permanent, unknown_metric, value_of
from framework.errors import ConfigError

KEY = "callbacks.async_checkpoint.keep"


def checkpoint(
    step: int,
    *,
    attempt: int = 1,
    created: float | None = None,
    metrics: Mapping[str, Any] | None = None,
    pinned: bool = False,
    is_damaged: bool = False,
) -> Found:
    if is_damaged:
        return Found(Path(f"step_{step:010d}"), step, damage="a file is cut off")
    manifest = Manifest(
        run="a-run", attempt=attempt, token="t", step=step, position=step, epoch=0, skipped=0, world_size=1, threads=1,
        versions={}, reason="interval", metrics=metrics or {}, created=float(step) if created is None else created,
        files={}, rank_files={}, shared_file="shared", pinned=pinned,
    )  # fmt: skip
    return Found(Path(f"step_{step:010d}"), step, header=manifest)


def left(found: list[Found], keep: Keep, protected: tuple[int, ...] = ()) -> list[int]:
    """The steps of the good ones that stay."""
    gone = {one.step for one in expendable(found, keep, protected=protected)}
    return sorted(one.step for one in found if is_good(one) and one.step not in gone)


def of_steps(*steps: int) -> list[Found]:
    return [checkpoint(step) for step in steps]


def scored(metric: str, **values: float) -> list[Found]:
    return [checkpoint(int(step[1:]), metrics={metric: value}) for step, value in values.items()]


values = st.one_of(st.floats(), st.sampled_from([0.25, 0.5, 0.75, 1, True, None, "0.5"]))
metrics = st.dictionaries(st.sampled_from(["eval/top1", "eval/loss", "other"]), values, max_size=2)
keeps = st.builds(
    Keep,
    last=st.one_of(st.none(), st.integers(1, 4)),
    every=st.one_of(st.none(), st.integers(1, 50)),
    best=st.integers(0, 3),
    metric=st.sampled_from(["top1", "eval/loss", "unknown"]),
    mode=st.sampled_from(["max", "min"]),
)
folders = st.lists(
    st.builds(
        checkpoint,
        st.integers(0, 120),
        attempt=st.integers(1, 4),
        created=st.floats(0, 1000),
        metrics=metrics,
        pinned=st.sampled_from([False, False, False, True]),
        is_damaged=st.sampled_from([False, False, False, True]),
    ),
    unique_by=lambda one: one.step,
    max_size=12,
)


@given(found=folders, keep=keeps, protected=st.frozensets(st.integers(0, 120), max_size=4))
@settings(max_examples=300, deadline=None)
def test_the_newest_good_one_and_all_that_is_marked_stay_under_any_rules(
    found: list[Found], keep: Keep, protected: frozenset[int]
) -> None:
    gone = expendable(found, keep, protected=protected)
    good = [one for one in found if is_good(one)]
    assert {one.step for one in gone} <= {one.step for one in good}
    assert len({one.step for one in gone}) == len(gone) and gone == sorted(gone, key=lambda one: -one.step)
    stays = {one.step for one in good} - {one.step for one in gone}
    if good:
        newest = sorted((one.step for one in good), reverse=True)
        assert set(newest if keep.last is None else newest[: keep.last]) <= stays and stays
        assert max(good, key=lambda one: (one.manifest.attempt, one.manifest.created, one.step)).step in stays
    assert {one.step for one in good if one.manifest.pinned or one.step in protected} <= stays


@given(found=folders, keep=keeps, seed=st.integers(0, 99))
@settings(max_examples=300, deadline=None)
def test_neither_the_order_nor_a_crash_between_deletions_changes_what_goes(
    found: list[Found], keep: Keep, seed: int
) -> None:
    gone = expendable(found, keep)
    chance = random.Random(seed)
    shuffled = chance.sample(found, len(found))
    assert expendable(shuffled, keep) == gone
    deleted = chance.sample(gone, chance.randint(0, len(gone)))
    rest = [one for one in found if one not in deleted]
    assert expendable(rest, keep) == [one for one in gone if one not in deleted]


@given(
    arrivals=st.lists(
        st.tuples(st.integers(0, 200), st.booleans(), st.sampled_from([0.5, 0.6, math.nan])), min_size=1, max_size=40
    ),
    every=st.integers(1, 60),
    keep_last=st.integers(1, 3),
)
@settings(max_examples=300, deadline=None)
def test_what_was_kept_for_ever_stays_as_more_arrive(
    arrivals: list[tuple[int, bool, float]], every: int, keep_last: int
) -> None:
    """Steps arrive in any order: a run may go back, in the same attempt and in a new one."""
    keep = Keep(last=keep_last, every=every, best=1, metric="top1")
    there: dict[int, Found] = {}
    for_ever: set[int] = set()
    spans: set[int] = set()
    attempt = 1
    for number, (step, is_new_attempt, value) in enumerate(arrivals):
        attempt += is_new_attempt
        if step in there:
            continue
        there[step] = checkpoint(step, attempt=attempt, created=float(number), metrics={"eval/top1": value})
        for one in expendable([*there.values()], keep):
            del there[one.step]
        now = permanent(there.values(), every)
        assert for_ever <= now <= there.keys()
        for_ever = now
        if step >= every:
            spans.add(step // every)
        assert {step // every for step in for_ever} == spans


def test_saves_by_time_are_kept_for_ever_at_the_first_step_at_or_after_each_multiple() -> None:
    found = of_steps(310, 640, 990, 1020, 1350, 1690, 2000, 2330, 4100, 4400, 4800)
    assert left(found, Keep(last=2, every=1000)) == [1020, 2000, 4100, 4400, 4800]
    assert left(found[:3], Keep(last=1, every=1000)) == [990]


def test_damaged_ones_are_not_counted_and_not_given_up() -> None:
    found = [checkpoint(step, is_damaged=step in (5, 7)) for step in range(1, 8)]
    assert left(found, Keep(last=2)) == [4, 6]
    assert [one.step for one in expendable(found, Keep(last=2))] == [3, 2, 1]
    assert expendable([checkpoint(1, is_damaged=True)], Keep(last=1)) == []


def test_the_best_are_kept_by_value_in_either_direction() -> None:
    found = scored("eval/top1", s1=0.1, s2=0.9, s3=0.5, s4=0.7, s5=0.2)
    assert left(found, Keep(last=1, best=2, metric="top1")) == [2, 4, 5]
    assert left(found, Keep(last=1, best=2, metric="eval/top1", mode="min")) == [1, 5]
    assert left(scored("top1", s1=0.1, s2=0.9, s3=0.5), Keep(last=1, best=1, metric="eval/top1")) == [2, 3]


def test_values_that_are_no_finite_numbers_are_never_the_best() -> None:
    found = scored("loss", s1=math.nan, s2=-math.inf, s3=2.0, s4=math.inf, s5=3.0) + of_steps(6, 7)
    assert left(found, Keep(last=1, best=3, metric="loss", mode="min")) == [3, 5, 7]
    assert left(found, Keep(last=1, best=3, metric="loss", mode="max")) == [3, 5, 7]
    assert [value_of({"a": value}, "a") for value in (True, "1", None, 1)] == [None, None, None, 1.0]


def test_copies_of_one_evaluation_do_not_push_out_the_others() -> None:
    """Saves are more frequent than evaluations, and each carries the results of the last one."""
    results = {1: 0.5, 2: 0.5, 3: 0.9, 4: 0.9, 5: 0.9, 6: 0.7, 7: 0.6}
    found = [checkpoint(step, metrics={"eval/top1": value}) for step, value in results.items()]
    assert left(found, Keep(last=1, best=3, metric="top1")) == [3, 6, 7]
    assert left(found[:5], Keep(last=1, best=3, metric="top1")) == [1, 3, 4, 5]


def test_a_metric_that_no_checkpoint_has_is_told_with_those_there_are() -> None:
    found = scored("eval/top1", s1=0.5)
    told = unknown_metric(found, Keep(best=1, metric="topl"))
    assert told is not None and "'topl'" in told and "There are: eval/top1" in told
    assert unknown_metric(found, Keep(best=1, metric="top1")) is None
    assert unknown_metric(of_steps(1), Keep(best=1, metric="top1")) is None
    assert unknown_metric(found, Keep(last=1)) is None


@pytest.mark.parametrize(
    ("value", "keep"),
    [
        (3, Keep(last=3)),
        (None, Keep(last=None)),
        (Keep(last=7), Keep(last=7)),
        ({"every": 1000}, Keep(last=3, every=1000)),
        ({"last": 2, "every": "500steps"}, Keep(last=2, every=500)),
        ({"last": None}, Keep(last=None)),
        (
            {"best": 3, "metric": "loss", "mode": "min"},
            Keep(last=3, best=3, metric="loss", mode="min"),
        ),
        ({"last": 2, "best": 0, "metric": "top1", "every": None}, Keep(last=2, metric="top1")),
    ],
)
def test_rules_are_read_as_users_write_them(value: Any, keep: Keep) -> None:
    assert Keep.parse(value, key=KEY) == keep


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (0, f"{KEY}=0 would delete every checkpoint"),
        (-1, f"{KEY}=-1 would delete every checkpoint"),
        (True, f"{KEY}=True is no whole number"),
        ("3", f"{KEY}='3' is no whole number"),
        (1.5, f"{KEY}=1.5 is no whole number"),
        ({}, f"{KEY}={{}} names nothing to keep"),
        ({"last": 0}, f"{KEY}.last=0 would delete every checkpoint"),
        ({"last": True}, f"{KEY}.last=True is no whole number"),
        ({"last": None, "every": 5}, f"{KEY}.last=null keeps all, so that {KEY}.every=5 means nothing"),
        ({"every": 0}, f"{KEY}.every=0 must be greater than 0"),
        ({"every": "1h"}, f"{KEY}.every='1h' is given in seconds"),
        ({"every": True}, f"{KEY}.every=True is not a duration"),
        ({"best": 3}, f"{KEY}.best=3 does not say by which metric"),
        ({"best": -1, "metric": "top1"}, f"{KEY}.best=-1 would delete"),
        ({"best": True, "metric": "top1"}, f"{KEY}.best=True is no whole number"),
        ({"best": 2, "metric": "val_loss"}, f"{KEY}.metric='val_loss' is good when it is low. Say so: {KEY}.mode=min"),
        ({"best": 2, "metric": "a", "mode": "mni"}, f"{KEY}.mode='mni' must be max or min. Did you mean 'min'?"),
        ({"best": 2, "metric": 1}, f"{KEY}.metric=1 is no name of a metric"),
        ({"metric": "top1"}, f"{KEY}.metric='top1' means nothing without {KEY}.best"),
        ({"latest": 3}, f"{KEY}.latest is no rule of what to keep: last, every, best, metric, mode. Did you mean"),
    ],
)
def test_what_would_keep_nothing_or_means_nothing_is_refused_by_key_and_value(value: Any, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Keep.parse(value, key=KEY)
    assert message in str(caught.value)


def test_rules_made_in_code_are_checked_too() -> None:
    for options in ({"last": 0}, {"every": 0}, {"best": -1}, {"best": 1}, {"mode": "mean"}):
        with pytest.raises(ValueError, match=next(iter(options))):
            Keep(**options)  # type: ignore[arg-type]
