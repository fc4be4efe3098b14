"""A job that fails, played event by event: what closed forms say, and what they cannot.

Guarantee: a pure function of its settings and the seed. Every second of the job is in exactly one of the parts of an
`Outcome`. Failures are a Poisson process that also strikes during saves and restarts, as in
`planning.formulas.goodput`; with the options at their defaults the simulated share agrees with that formula.
"""

from __future__ import annotations

import heapq
import math
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

HOUR, DAY = 3600.0, 86_400.0
NEVER = math.inf


@dataclass(frozen=True, slots=True)
class Scenario:
    """A job and what happens to it. Lengths in seconds.

    Args:
        gpus: Number of GPUs.
        gpu_hours: Mean GPU-hours between failures.
        interval: Time of computing between two saves.
        stall: How long a save holds the steps up.
        persist: From there until the save is durable, while the job goes on; a save that is due before is left out.
        restart: From a failure to the first step after it.
        length: How long the job is watched.
        slow_share: Share of the saves that take `slow_factor` times as long to be durable.
        slow_factor: See `slow_share`.
        wave_every: Mean time between waves of preemption, none without them. A wave is announced: the job saves,
            losing nothing, and stands still for `wave_length`.
        wave_length: How long a wave lasts.
        node_gpus: GPUs that a failure takes away where nodes are repaired.
        repair: How long a failed node is repaired; 0: a restart finds it whole.
        spares: Nodes that stand by for those in repair. Without one the job waits for a repair, or goes on smaller.
        is_elastic: Whether the job goes on with fewer nodes, and takes back a repaired one after a save, at the price
            of a restart.
        fast_every: Time between saves into the memory of other hosts, none without them.
        fast_stall: How long such a save holds the steps up.
        fast_share: Share of the failures that such a save survives.
    """

    gpus: int
    gpu_hours: float
    interval: float
    stall: float = 0.0
    persist: float = 0.0
    restart: float = 0.0
    length: float = 54 * DAY
    slow_share: float = 0.0
    slow_factor: float = 5.0
    wave_every: float | None = None
    wave_length: float = HOUR
    node_gpus: int = 8
    repair: float = 0.0
    spares: int = 0
    is_elastic: bool = False
    fast_every: float | None = None
    fast_stall: float = 0.0
    fast_share: float = 0.8

    @property
    def mtbf(self) -> float:
        """Mean time between failures at full size, seconds."""
        return self.gpu_hours * HOUR / self.gpus


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of it, in seconds; `productive` + `lost` + `smaller` + `stall` + `restart` + `wait` = `wall`.

    Args:
        productive: Finished work, as seconds at full size.
        lost: Work that a failure took, likewise.
        smaller: What computing with fewer nodes left undone.
        stall: Saves holding the steps up.
        restart: Starting again, whole or broken off.
        wait: Waiting for nodes, or for the end of a wave.
        wall: Length of the job.
        failures: Number of failures.
        skipped: Saves left out because the one before was not durable yet.
    """

    productive: float
    lost: float
    smaller: float
    stall: float
    restart: float
    wait: float
    wall: float
    failures: int
    skipped: int

    @property
    def goodput(self) -> float:
        return self.productive / self.wall


@dataclass(slots=True)
class _Job:
    """The state of the job, between events."""

    scenario: Scenario
    draw: random.Random
    clock: float = 0.0
    work: float = 0.0  # seconds at full size
    durable: float = 0.0
    fast: float = 0.0  # in the memory of other hosts
    pending: tuple[float, float] | None = None  # work in a save, and when it is durable
    lost: float = 0.0
    smaller: float = 0.0
    stall: float = 0.0
    restart: float = 0.0
    wait: float = 0.0
    failures: int = 0
    skipped: int = 0
    down: int = 0  # nodes that the job has to do without
    spares: int = 0
    repairs: list[float] = field(default_factory=list)  # when nodes come back
    next_failure: float = NEVER
    next_wave: float = NEVER

    def __post_init__(self) -> None:
        self.spares = self.scenario.spares
        self.draw_failure()
        self.draw_wave()

    @property
    def speed(self) -> float:
        one = self.scenario
        return max(0.0, 1.0 - self.down * one.node_gpus / one.gpus)

    def draw_failure(self) -> None:
        """The next one; drawn anew whenever the size changes, which a Poisson process does not notice."""
        self.next_failure = self.clock + self.draw.expovariate(max(self.speed, 1e-9) / self.scenario.mtbf)

    def draw_wave(self) -> None:
        every = self.scenario.wave_every
        self.next_wave = NEVER if every is None else self.clock + self.draw.expovariate(1.0 / every)

    def settle(self) -> None:
        """A save that is durable by now counts."""
        if self.pending is not None and self.pending[1] <= self.clock:
            self.durable = self.pending[0]
            self.pending = None

    def compute(self, seconds: float) -> bool:
        """Works for so long; whether nothing struck."""
        end = min(self.clock + seconds, self.next_failure, self.next_wave)
        passed = end - self.clock
        self.work += passed * self.speed
        self.smaller += passed * (1.0 - self.speed)
        is_whole = end == self.clock + seconds
        self.clock = end
        return is_whole

    def spend(self, kind: str, seconds: float) -> bool:
        """Is held up for so long; whether no failure struck. Waves wait until the job computes."""
        end = min(self.clock + seconds, self.next_failure)
        setattr(self, kind, getattr(self, kind) + end - self.clock)
        is_whole = end == self.clock + seconds
        self.clock = end
        return is_whole

    def idle(self, seconds: float) -> None:
        """Waits for so long. Nothing fails meanwhile: nothing runs."""
        self.clock += seconds
        self.wait += seconds
        self.draw_failure()


def simulate(scenario: Scenario, seed: int = 0) -> Outcome:
    """Plays one job.

    Args:
        scenario: The job.
        seed: Of its random numbers.
    """
    job = _Job(scenario, random.Random(seed))
    fast = scenario.fast_every or NEVER
    while job.clock < scenario.length:
        _run_ahead(job)
        left, is_whole = scenario.interval, True
        while is_whole and left > 0:
            is_whole = job.compute(min(left, fast))
            left -= fast
            if is_whole and left > 0:
                is_whole = job.spend("stall", scenario.fast_stall)
                job.fast = job.work if is_whole else job.fast
        if is_whole:
            is_whole = _save(job)
        if not is_whole:
            _recover(job)
        elif scenario.is_elastic and job.down:
            _grow(job)
    return Outcome(
        job.work, job.lost, job.smaller, job.stall, job.restart, job.wait, job.clock, job.failures, job.skipped
    )


def runs(scenario: Scenario, count: int, seed: int = 0) -> list[Outcome]:
    """Plays several jobs, with seeds `seed`, `seed + 1` and so on."""
    return [simulate(scenario, seed + number) for number in range(count)]


def spread(outcomes: Sequence[Outcome]) -> tuple[float, float]:
    """Mean goodput and its standard error, none of which is known of a single job: 0."""
    values = [one.goodput for one in outcomes]
    error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else 0.0
    return statistics.fmean(values), error


def _run_ahead(job: _Job) -> None:
    """Takes all intervals but the last that end before anything can happen in one go, where each is like the other."""
    one = job.scenario
    is_even = one.fast_every is None and not one.slow_share and one.persist <= one.interval
    if not is_even or (one.is_elastic and job.down):
        return
    cycle = one.interval + one.stall
    count = int((min(job.next_failure, job.next_wave, one.length) - job.clock) / cycle) - 1
    if count < 1:
        return
    job.clock += count * cycle
    job.work += count * one.interval * job.speed
    job.smaller += count * one.interval * (1.0 - job.speed)
    job.stall += count * one.stall
    if count > 1:
        job.durable = job.work - one.interval * job.speed
    elif job.pending is not None:
        job.durable = job.pending[0]
    job.pending = (job.work, job.clock + one.persist)
    job.settle()


def _save(job: _Job) -> bool:
    one = job.scenario
    job.settle()
    if job.pending is not None:
        job.skipped += 1
        return True
    captured = job.work
    if not job.spend("stall", one.stall):
        return False
    slow = one.slow_factor if one.slow_share and job.draw.random() < one.slow_share else 1.0
    job.pending = (captured, job.clock + one.persist * slow)
    job.settle()
    return True


def _recover(job: _Job) -> None:
    """After a failure, or a wave: until the job computes again, or its time is over."""
    one = job.scenario
    is_down = True
    if job.next_failure > job.clock:  # a wave, of which the job was told
        job.durable = job.fast = job.work
        job.pending = None
        if job.spend("stall", one.stall + one.persist):
            job.idle(one.wave_length)
            is_down = not job.spend("restart", one.restart)
    while is_down and job.clock < one.length:
        _fail(job)
        _staff(job)
        is_down = not job.spend("restart", one.restart)
    if job.next_wave <= job.clock:  # whoever stands still anyway does not notice another
        job.draw_wave()


def _fail(job: _Job) -> None:
    one = job.scenario
    job.failures += 1
    job.settle()
    job.pending = None
    kept = job.durable
    if one.fast_every is not None and job.draw.random() < one.fast_share:
        kept = max(kept, job.fast)
    job.fast = kept
    job.lost += job.work - kept
    job.work = kept
    if one.repair:
        heapq.heappush(job.repairs, job.clock + one.repair)
        job.down += 1
    job.draw_failure()


def _staff(job: _Job) -> None:
    """Replaces what is down by spares, or waits for repairs, or goes on without."""
    _repaired(job)
    while job.down and not (job.scenario.is_elastic and job.speed > 0):
        job.idle(job.repairs[0] - job.clock)
        _repaired(job)
    job.draw_failure()


def _repaired(job: _Job) -> None:
    while job.repairs and job.repairs[0] <= job.clock:
        heapq.heappop(job.repairs)
        job.spares += 1
    used = min(job.spares, job.down)
    job.spares -= used
    job.down -= used


def _grow(job: _Job) -> None:
    """Takes repaired nodes back after a save, at the price of a restart from it."""
    before = job.down
    _repaired(job)
    if job.down == before:
        return
    job.draw_failure()
    if not job.spend("restart", job.scenario.restart):
        _recover(job)
