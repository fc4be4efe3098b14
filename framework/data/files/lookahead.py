"""Fetches what will be asked for before it is: as many requests at once as hide the latency, within a budget of bytes.

Guarantee: what is asked for is never behind what is only announced, and no wait is longer than the deadline: a request
that has no answer by then is an error that names its file, and its thread is left alone. What was announced and never
asked for is dropped once later things were asked for. Bytes that are held or under way stay within the budget, but for
what is asked for now.
"""

from __future__ import annotations

import atexit
import math
import os
import queue
import threading
import time
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable

from framework.data.files.reading import Watch
from framework.ending import Background

FIRST_DEPTH = 16  # requests at once before anything was measured
LEAST_DEPTH = 2
RESERVE = 1.5  # times what Little's law asks for
GRACE_SECONDS = 1.0  # for a request to end at its own deadline
PASSED = 64  # a batch may be asked for in another order than announced, within so many

WAITING, RUNNING, DONE = range(3)


class Job:
    """One file that is fetched.

    Args:
        index: Which.
        size: Its bytes.

    Attributes:
        data: Its content, if that is held.
        path: Where it is, if it is in the cache.
        error: Why it could not be fetched.
    """

    __slots__ = ("data", "done", "error", "held", "index", "order", "path", "size", "state", "wanted", "watch")

    def __init__(self, index: int, size: int) -> None:
        self.index = index
        self.size = size
        self.state = WAITING
        self.order = 0  # of its announcement
        self.wanted = 1  # how often it was announced and not asked for yet
        self.held = 0  # bytes of the budget
        self.watch = Watch()
        self.data: bytes | None = None
        self.path: str | None = None
        self.error: BaseException | None = None
        self.done: threading.Event | None = None  # if somebody waits


class Depth:
    """How many requests at once hide the latency: by Little's law, the rate of the consumer × the 95th percentile.

    The rate is that of a consumer that never waits for a file, so that waiting does not make it look slow.

    Args:
        most: The highest depth, at least 1.
        clock: Seconds.
    """

    def __init__(self, most: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.most = most
        self._clock = clock
        self.value = min(FIRST_DEPTH, most)
        self._seconds: deque[float] = deque(maxlen=128)
        self._rate = 0.0
        self._since = clock()
        self._taken = 0
        self._waited = 0.0

    def answered(self, seconds: float) -> None:
        """A request took so long."""
        self._seconds.append(seconds)

    def asked(self, waited_seconds: float) -> None:
        """The consumer got a file, and waited so long for it."""
        self._taken += 1
        self._waited += waited_seconds
        if self._taken >= 32:
            self._update(self._clock())

    def _update(self, now: float) -> None:
        busy = max(now - self._since - self._waited, 1e-5 * self._taken)
        rate = self._taken / busy
        self._rate = (self._rate + rate) / 2 if self._rate else rate
        self._since, self._taken, self._waited = now, 0, 0.0
        if self._seconds:
            slow = sorted(self._seconds)[int(0.95 * (len(self._seconds) - 1))]
            least = min(LEAST_DEPTH, self.most)
            self.value = max(least, min(self.most, math.ceil(self._rate * slow * RESERVE)))


class LookAhead:
    """Threads that fetch. Thread-safe; for one process only.

    Args:
        fetch: Fetches a job: sets its `data` or `path`, or raises. Runs in the threads.
        stuck: Lets the request of a job alone, and makes the error for it.
        threads: The most requests at once, at least 1.
        budget_bytes: Bytes that may be held and under way.
        deadline_seconds: After which a request without an answer is given up.
    """

    def __init__(
        self,
        fetch: Callable[[Job], None],
        stuck: Callable[[Job], Exception],
        *,
        threads: int,
        budget_bytes: int,
        deadline_seconds: float,
    ) -> None:
        self._fetch = fetch
        self._stuck = stuck
        self._budget_bytes = budget_bytes
        self._deadline_seconds = deadline_seconds
        self.depth = Depth(threads)
        self._lock = threading.Lock()
        self._jobs: OrderedDict[int, Job] = OrderedDict()  # those announced or under way, in order
        self._waiting: deque[Job] = deque()
        self._tasks: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._recent: deque[int] = deque(maxlen=PASSED)  # orders that were asked for
        self._order = 0
        self._threads = self._free = self._running = self._held = 0
        self._is_stopped = False
        _running.add(self)

    def announce(self, jobs: Iterable[Job]) -> None:
        """These will be asked for, in this order; those with a path are done already. Never raises."""
        with self._lock:
            for job in jobs:
                known = self._jobs.get(job.index)
                self._order += 1
                if known is not None:
                    known.wanted += 1
                    known.order = self._order
                    self._jobs.move_to_end(job.index)
                    continue
                job.order = self._order
                self._jobs[job.index] = job
                if job.path is not None:
                    job.state = DONE
                else:
                    self._waiting.append(job)
            self._pump()

    def knows(self, index: int) -> bool:
        """Whether a file was announced and not asked for since."""
        return index in self._jobs

    def take(self, index: int, size: int) -> Job:
        """The job of a file, done: one that was announced, or one that is begun now, before all others.

        Args:
            index: The file.
            size: Its bytes, if it was not announced.

        Raises:
            Exception: What fetching raised, or the error of `stuck`.
        """
        waited = 0.0
        with self._lock:
            job = self._jobs.get(index)
            if job is None:
                job = self._jobs[index] = Job(index, size)
                self._order += 1
                job.order = self._order
            if job.state == WAITING:
                self._start(job)
            if job.state != DONE:
                job.done = done = job.done or threading.Event()
        if job.state != DONE:
            began = time.monotonic()
            self._wait(job, done)
            waited = time.monotonic() - began
        with self._lock:
            job.wanted -= 1
            if job.wanted <= 0 or job.error is not None:
                self._forget(job)
            self._pass(job.order)
            self.depth.asked(waited)
            self._pump()
        if job.error is not None:
            raise job.error
        return job

    def cancel(self) -> None:
        """What was announced will not be asked for."""
        with self._lock:
            for job in [job for job in self._jobs.values() if job.done is None]:
                self._drop(job)
            self._waiting.clear()

    def stop(self) -> None:
        """Ends the threads once they are free, and forgets everything. Idempotent."""
        with self._lock:
            self._is_stopped = True
            for job in self._jobs.values():
                job.watch.is_abandoned = True
            self._jobs.clear()
            self._waiting.clear()
            for _ in range(self._threads):
                self._tasks.put(None)

    def _wait(self, job: Job, done: threading.Event) -> None:
        limit = self._deadline_seconds + GRACE_SECONDS
        while not done.wait(max(0.0, job.watch.moved + limit - time.monotonic()) + 0.001):
            if time.monotonic() < job.watch.moved + limit:
                continue
            with self._lock:
                if job.state == DONE:
                    return
                job.error = self._abandoned(job)
                done.set()

    def _forget(self, job: Job) -> None:
        if self._jobs.get(job.index) is job:
            del self._jobs[job.index]
        self._held -= job.held
        job.held = 0

    def _pass(self, order: int) -> None:
        """Drops what was announced long before the things that are asked for now."""
        self._recent.append(order)
        if len(self._recent) < PASSED:
            return
        oldest = min(self._recent) if self._jobs and next(iter(self._jobs.values())).order < order - PASSED else 0
        while self._jobs and (job := next(iter(self._jobs.values()))).order < oldest:
            self._drop(job)

    def _drop(self, job: Job) -> None:
        if job.state == RUNNING:
            self._abandoned(job)
        job.state = DONE
        self._forget(job)

    def _abandoned(self, job: Job) -> Exception:
        """Lets a thread alone: it ends when its request does, and another may be in its place until then."""
        job.watch.is_abandoned = True
        job.state = DONE
        self._running -= 1
        self._threads -= 1
        return self._stuck(job)

    def _pump(self) -> None:
        while (job := self._next()) is not None:
            self._start(job)

    def _next(self) -> Job | None:
        """The next job to begin, if depth and budget permit one."""
        while self._waiting:
            job = self._waiting[0]
            if job.state == WAITING:
                is_too_much = self._held > 0 and self._held + job.size > self._budget_bytes
                if is_too_much or self._running >= self.depth.value or self._is_stopped:
                    return None
                self._waiting.popleft()
                return job
            self._waiting.popleft()
        return None

    def _begin(self, job: Job) -> None:
        job.state = RUNNING
        job.watch.moved = time.monotonic()
        job.held = job.size
        self._held += job.size
        self._running += 1

    def _start(self, job: Job) -> None:
        self._begin(job)
        if self._free > 0:
            self._free -= 1
            self._tasks.put(job)
            return
        thread = Background(lambda: self._run(job), "file fetcher")
        try:
            thread.start()
            self._threads += 1
        except RuntimeError as error:  # this user may have no more threads
            if self._threads:
                self._free -= 1  # the next that is free takes it
                self._tasks.put(job)
            else:
                self._running -= 1
                job.error, job.state = error, DONE

    def _run(self, job: Job | None) -> None:
        while job is not None:
            try:
                self._fetch(job)
                error = None
            except BaseException as failure:  # whoever asks for the file has to hear of it
                error = failure
            with self._lock:
                if job.state == DONE:
                    return  # let alone
                self._finish(job, error)
                job = self._next()
                if job is not None:
                    self._begin(job)
                elif self._is_stopped:
                    return
                else:
                    self._free += 1
            if job is None:
                job = self._tasks.get()

    def _finish(self, job: Job, error: BaseException | None) -> None:
        job.error = error
        job.state = DONE
        self._running -= 1
        if job.watch.seconds is not None:
            self.depth.answered(job.watch.seconds)
        is_held = job.data is not None and self._jobs.get(job.index) is job
        if not is_held:
            self._held -= job.held
            job.held = 0
        if job.done is not None:
            job.done.set()


_running: weakref.WeakSet[LookAhead] = weakref.WeakSet()  # of this process


def _stop_all() -> None:
    for each in list(_running):
        each.stop()


os.register_at_fork(after_in_child=_running.clear)
atexit.register(_stop_all)  # before the handler of `framework.ending`, which waits for threads
