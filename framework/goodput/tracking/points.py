"""Turns the events of a run into what a tracking server shows.

Guarantee: what comes out is a function of the events alone, in their order: the same journal always gives the same
points, down to the time stamps. No key gets two points for one step, however often a restart does the step again. An
event that is not as it should be stops nothing.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from framework.data.stats import DataStats
from framework.goodput.accounts.failures import Failures, failures
from framework.goodput.accounts.ledger import MALFORMED, Ledger
from framework.goodput.accounts.results import Goodput
from framework.goodput.tracking.names import safe_key

GOODPUT_EVERY_SECONDS = 5.0
RATIOS = ("ratio", "ratio_durable", "runtime", "capacity", "window_1h", "window_24h")
FAILURES = (
    "failures/count", "failures/rate_per_day", "failures/mtbf_seconds", "failures/mtbf_low_seconds",
    "failures/mtbf_high_seconds", "recovery/mttr_seconds", "recovery/detect_seconds", "recovery/down_seconds",
    "recovery/queue_seconds", "recovery/restore_seconds",
)  # fmt: skip
MAX_TAG = 5000  # characters of a tag value that every store takes


@dataclass(frozen=True, slots=True)
class Point:
    """One value of one metric.

    Args:
        key: Name of the metric.
        value: Its value; may be `nan` or infinite.
        step: Optimizer step.
        timestamp: Milliseconds since the epoch.
    """

    key: str
    value: float
    step: int
    timestamp: int


@dataclass(frozen=True, slots=True)
class Update:
    """What one event adds: points, and tags to set."""

    points: list[Point] = field(default_factory=list)
    tags: dict[str, str] = field(default_factory=dict)


class PointMaker:
    """Takes the events of a run one after the other.

    The high-water mark of each metric, up to which a replayed step is left out, is thus known again after a restart
    by reading the journal from its beginning.
    """

    def __init__(self) -> None:
        self.ledger = Ledger()
        self._mark: dict[str, int] = {}
        self._names: dict[str, str] = {}
        self._seen: set[str] = set()
        self._data = DataStats()
        self._pending: tuple[int, int, Goodput] | None = None
        self._failures: Failures | None = None
        self._told: dict[str, float] = {}  # of failures, which change seldom
        self._published = -math.inf  # wall of the last published account

    def feed(self, event: Mapping[str, Any]) -> Update:
        """What this event adds."""
        update = Update()
        if self.ledger.attempts and int(event["att"]) > self.ledger.attempts[-1].number:
            update.points.extend(self.rest())
        self.ledger.add(event)
        with contextlib.suppress(*MALFORMED):
            self._take(event, update)
        return update

    def _take(self, event: Mapping[str, Any], update: Update) -> None:
        match event["ev"]:
            case "steps":
                self._steps(event, update.points)
            case "metrics":
                for name, value in (event.get("values") or {}).items():
                    self._put(update.points, name, value, int(event["step"]), _milliseconds(event["t"]))
            case "data":
                self._loading(event, update.points)
            case "save_committed":
                self._saved(event, update.points)
            case "attempt_start":
                self._attempt(event, update.tags)
            case "train_start":
                self._failures = failures(self.ledger, is_live=True)
                update.tags[f"attempt.{event['att']}.step"] = str(event["step"])
            case "end":
                self._failures = failures(self.ledger, is_live=True)
                self._hold(event)
                update.points.extend(self.rest())
                update.tags[f"attempt.{event['att']}.status"] = str(event.get("status"))
                update.tags[f"attempt.{event['att']}.reason"] = str(event.get("reason") or "")[:MAX_TAG]

    def rest(self) -> list[Point]:
        """The newest account, held back so far because a newer one of the same step may still have come."""
        points: list[Point] = []
        if self._pending is not None:
            self._publish(points)
        return points

    def _put(self, points: list[Point], name: str, value: Any, step: int, timestamp: int) -> None:
        if not isinstance(value, (int, float)) or self._mark.get(name, -1) >= step:
            return
        self._mark[name] = step
        points.append(Point(self._key(name), float(value), step, timestamp))

    def _key(self, name: str) -> str:
        if name not in self._names:
            key, number = safe_key(name), 2
            while key in self._names.values():
                key, number = f"{safe_key(name)[:240]}_{number}", number + 1
            self._names[name] = key
        return self._names[name]

    def _steps(self, event: Mapping[str, Any], points: list[Point]) -> None:
        first, seconds = int(event["first"]), event.get("seconds") or {}
        series = {f"train/{name}": values for name, values in (event.get("metrics") or {}).items()}
        series |= {"train/loss": event.get("loss") or [], "train/lr": event.get("lr") or []}
        count = max([len(values) for values in (*series.values(), *seconds.values())], default=0)
        if seconds:
            series["data/fetch_seconds"] = seconds.get("data_wait") or [0.0] * count
            series["data/fetch_fraction"] = _fractions(series["data/fetch_seconds"], seconds)
        ends = _ends(event, seconds, count)
        for index in range(count):
            for name, values in series.items():
                if index < len(values):
                    self._put(points, name, values[index], first + index, ends[index])
        if not seconds:
            return
        if self._pending is not None and self._pending[2].wall - self._published >= GOODPUT_EVERY_SECONDS:
            self._publish(points)
        self._hold(event)

    def _hold(self, event: Mapping[str, Any]) -> None:
        account = self.ledger.total()
        if account.is_measured:
            self._pending = (account.steps_done, _milliseconds(event["t"]), account)

    def _publish(self, points: list[Point]) -> None:
        assert self._pending is not None
        step, timestamp, account = self._pending
        self._pending = None
        self._published = account.wall
        for name in RATIOS:
            self._put(points, f"goodput/{name}", getattr(account, name), step, timestamp)
        self._put(points, "checkpoint/age_seconds", account.checkpoint_age, step, timestamp)
        self._put(points, "checkpoint/interval_seconds", account.checkpoint_interval, step, timestamp)
        self._put(points, "checkpoint/age_over_interval", account.age_over_interval, step, timestamp)
        self._publish_failures(points, step, timestamp)
        for name, value in account.seconds.items():
            if value or name in self._seen:  # no curve for what never happened
                self._seen.add(name)
                self._put(points, f"goodput/{name}_seconds", value, step, timestamp)

    def _publish_failures(self, points: list[Point], step: int, timestamp: int) -> None:
        if self._failures is None or not self._failures.count:
            return  # no curve for what never happened
        for key in FAILURES:
            value = getattr(self._failures, key.split("/")[1])
            if value is not None and self._told.get(key) != value and self._mark.get(key, -1) < step:
                self._told[key] = value
                self._put(points, key, value, step, timestamp)

    def _loading(self, event: Mapping[str, Any], points: list[Point]) -> None:
        """Rates of the last steps; sums since the run began."""
        step, timestamp = int(event["step"]), _milliseconds(event["t"])
        new = DataStats.from_json(event)
        self._data.add(new)
        values: dict[str, float | None] = {"cache_hit_rate": new.hit_rate}
        for name, quantile in (("read_p50_seconds", 0.5), ("read_p95_seconds", 0.95)):
            values[name] = new.read_seconds(quantile)
        for name in ("bytes_fetched", "retries", "skipped", "worker_restarts"):
            values[name] = getattr(self._data, name) or None  # no curve for what never happened
        for name, value in values.items():
            self._put(points, f"data/{name}", value, step, timestamp)

    def _saved(self, event: Mapping[str, Any], points: list[Point]) -> None:
        step, timestamp = int(event["step"]), _milliseconds(event["t"])
        self._put(points, "checkpoint/stall_seconds", event.get("stall_seconds"), step, timestamp)
        self._put(points, "checkpoint/persist_seconds", event.get("persist_seconds"), step, timestamp)
        self._put(points, "checkpoint/step", step, step, timestamp)

    def _attempt(self, event: Mapping[str, Any], tags: dict[str, str]) -> None:
        number = event["att"]
        tags["attempts"] = str(number)
        tags["run_dir"] = str(event.get("run") or "")
        for name in ("host", "world_size", "config_hash"):
            if event.get(name) is not None:
                tags[f"attempt.{number}.{name}"] = str(event[name])
        for name, version in (event.get("versions") or {}).items():
            tags[safe_key(f"attempt.{number}.version.{name}")] = str(version)
        for key, value in (event.get("config_changed") or {}).items():
            text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
            tags[safe_key(f"attempt.{number}.config.{key}")] = text[:MAX_TAG]
        command = event.get("command") or []
        tags[f"attempt.{number}.command"] = " ".join(map(str, command))[:MAX_TAG]


def _milliseconds(seconds: float) -> int:
    return int(seconds * 1000)


def _fractions(waits: list[float], seconds: Mapping[str, list[float]]) -> list[float]:
    """The part of each step that was spent waiting for data."""
    totals = [sum(values[i] for values in seconds.values() if i < len(values)) for i in range(len(waits))]
    return [wait / total if total > 0 else 0.0 for wait, total in zip(waits, totals, strict=True)]


def _ends(event: Mapping[str, Any], seconds: Mapping[str, list[float]], count: int) -> list[int]:
    """When each step ended, milliseconds since the epoch; the time of the event where it was not measured."""
    if not seconds or "start" not in event:
        return [_milliseconds(event["t"])] * count
    at, ends = float(event["start"]), []
    for index in range(count):
        at += sum(values[index] for values in seconds.values() if index < len(values))
        ends.append(_milliseconds(at))
    return ends
