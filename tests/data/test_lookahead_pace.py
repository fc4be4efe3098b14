"""How many requests are made at once: enough to hide the latency, fewer when the store asks for it; what is passed over goes."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
from lookahead_support import wait_for

from framework.data.files import limiter as limits
from framework.data.files.limiter import FLOOR, OUTAGE, Limiter, Ticket, limiter_of
from framework.data.files.lookahead import PASSED, Depth, Job, LookAhead


class Clock:
    """Time that passes when told."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize(("rate", "latency", "depth"), [(700, 0.04, 42), (100, 0.04, 6), (10, 0.04, 2), (9000, 1, 64)])
@pytest.mark.parametrize("waited", [0.0, 0.3])
def test_the_depth_hides_the_latency_from_a_consumer_that_never_waits(
    rate: float, latency: float, depth: int, waited: float
) -> None:
    clock = Clock()
    measured = Depth(64, clock)
    for _ in range(320):
        measured.answered(latency)
        clock.now += 1 / rate + waited
        measured.asked(waited)
    assert measured.value == pytest.approx(depth, abs=1)


def test_a_few_slow_answers_do_not_set_the_depth_but_one_in_ten_does() -> None:
    for slow, depth in ((50, 6), (10, 64)):
        clock = Clock()
        measured = Depth(64, clock)
        for number in range(320):
            measured.answered(4.0 if number % slow == 0 else 0.04)
            clock.now += 0.01
            measured.asked(0.0)
        assert measured.value == pytest.approx(depth, abs=1)


def test_the_depth_is_never_above_the_threads() -> None:
    assert Depth(3).value == 3 and Depth(64).value < 64


def entered(limiter: Limiter) -> Ticket:
    ticket = limiter.enter(0.0)
    assert ticket is not None
    return ticket


def test_the_limit_falls_by_half_once_for_what_was_under_way_and_rises_slowly() -> None:
    limiter = Limiter(64)
    tickets = [entered(limiter) for _ in range(32)]
    for ticket in tickets[:10]:
        limiter.leave(ticket, is_busy=True)
    assert (limiter.limit, limiter.cuts) == (16.0, 1)
    for ticket in tickets[10:]:
        limiter.leave(ticket)
    answers = 0
    while limiter.limit < 17:
        limiter.leave(entered(limiter), is_good=True)
        answers += 1
    assert 60 <= answers <= 70
    for _ in range(20):
        limiter.leave(entered(limiter), is_busy=True)
    assert limiter.limit == FLOOR
    for _ in range(100_000):
        limiter.leave(entered(limiter), is_good=True)
    assert limiter.limit == 64.0


def test_nobody_enters_above_the_limit() -> None:
    limiter = Limiter(2)
    tickets = [entered(limiter), entered(limiter)]
    assert limiter.enter(0.01) is None
    limiter.leave(tickets[0])
    limiter.leave(tickets[0])  # a second time nothing happens
    third = entered(limiter)
    assert limiter.enter(0.0) is None
    waiting: list[Ticket | None] = []
    thread = threading.Thread(target=lambda: waiting.append(limiter.enter(60)), daemon=True)
    thread.start()
    limiter.leave(third)
    thread.join(60)
    assert waiting[0] is not None


def test_the_first_good_answer_after_an_outage_wakes_those_who_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "FIRST_SECONDS", 1e6)
    monkeypatch.setattr(limits, "LONGEST_SECONDS", 1e6)
    limiter = Limiter(8)
    threads = [
        threading.Thread(target=limiter.pause, args=(9, 1e6), kwargs={"is_busy": False}, daemon=True) for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    wait_for(lambda: limiter._sleepers == 3, "three who pause")
    for _ in range(OUTAGE - 1):
        limiter.leave(entered(limiter))
    limiter.leave(entered(limiter), is_good=True)  # a bad file among good ones is no outage
    threads[0].join(0.2)
    assert all(thread.is_alive() for thread in threads)
    for _ in range(OUTAGE):
        limiter.leave(entered(limiter))
    limiter.leave(entered(limiter), is_good=True)
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)


def test_a_pause_never_goes_beyond_what_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "FIRST_SECONDS", 1e6)
    monkeypatch.setattr(limits, "LONGEST_SECONDS", 1e6)
    for is_busy in (False, True):
        Limiter(8).pause(12, 0.0, is_busy=is_busy)
        Limiter(8).pause(12, -5.0, is_busy=is_busy)


def test_a_store_has_one_limiter() -> None:
    assert limiter_of("s3://one-store", 8) is limiter_of("s3://one-store", 16)
    assert limiter_of("s3://one-store", 8) is not limiter_of("s3://other-store", 8)


class Fetches:
    """What is fetched: `hold` lets requests wait until `go`."""

    def __init__(self) -> None:
        self.begun: list[int] = []
        self.go = threading.Event()
        self.go.set()

    def __call__(self, job: Job) -> None:
        self.begun.append(job.index)
        assert self.go.wait(60)
        job.data = bytes(job.size)


@pytest.fixture
def fetches() -> Fetches:
    return Fetches()


@pytest.fixture
def ahead(fetches: Fetches) -> Iterator[LookAhead]:
    made = LookAhead(
        fetches, lambda job: TimeoutError(str(job.index)), threads=4, budget_bytes=1000, deadline_seconds=60.0
    )
    yield made
    fetches.go.set()
    made.stop()


def jobs(indices: range) -> list[Job]:
    return [Job(index, 100) for index in indices]


def test_what_was_passed_over_is_dropped_and_its_bytes_are_free_again(ahead: LookAhead, fetches: Fetches) -> None:
    ahead.announce(jobs(range(10)))  # nobody will ask for them; they fill the budget
    wait_for(lambda: len(fetches.begun) == 10, "ten files")
    fetches.go.clear()
    ahead.announce(jobs(range(100, 400)))
    fetches.go.set()
    for index in range(100, 100 + PASSED + 1):
        assert ahead.take(index, 100).data == bytes(100)
    assert not any(ahead.knows(index) for index in range(10))
    assert all(ahead.knows(index) for index in range(100 + PASSED + 1, 400))
    wait_for(lambda: len(fetches.begun) >= 10 + PASSED + 1 + 9, "as many ahead as the budget permits")


def test_a_batch_may_be_asked_for_in_another_order(ahead: LookAhead, fetches: Fetches) -> None:
    for start in range(0, 320, 32):
        ahead.announce(jobs(range(start, start + 32)))
    for start in range(0, 320, 32):
        for index in reversed(range(start, start + 32)):
            ahead.take(index, 100)
    assert sorted(fetches.begun) == list(range(320))


def test_a_file_larger_than_the_budget_is_fetched_alone(ahead: LookAhead, fetches: Fetches) -> None:
    fetches.go.clear()
    ahead.announce([Job(0, 100), Job(1, 5000), Job(2, 100)])
    wait_for(lambda: fetches.begun == [0], "the first")
    fetches.go.set()
    assert ahead.take(0, 100).data == bytes(100)
    wait_for(lambda: fetches.begun == [0, 1], "the large one, which nobody asked for yet")
    assert ahead.take(1, 5000).data == bytes(5000)
    wait_for(lambda: fetches.begun == [0, 1, 2], "the last")


def test_an_error_is_raised_where_the_file_is_asked_for_and_not_kept(ahead: LookAhead, fetches: Fetches) -> None:
    def fail(job: Job) -> None:
        raise OSError(f"no {job.index}")

    ahead._fetch = fail
    ahead.announce(jobs(range(3)))
    for index in range(3):
        with pytest.raises(OSError, match=f"no {index}"):
            ahead.take(index, 100)
    ahead._fetch = fetches
    assert ahead.take(1, 100).data == bytes(100)


def test_one_that_hangs_makes_no_other_wait(ahead: LookAhead, fetches: Fetches) -> None:
    ahead._deadline_seconds = -0.5  # with the grace half a second
    fetches.go.clear()
    for index in range(6):  # more than there are threads
        with pytest.raises(TimeoutError, match=str(index)):
            ahead.take(index, 100)
    fetches.go.set()
    ahead._deadline_seconds = 60.0
    ahead.announce(jobs(range(10, 30)))
    for index in range(10, 30):
        assert ahead.take(index, 100).data == bytes(100)
    assert ahead._running == 0 and ahead._held == 0


def test_what_is_cancelled_is_fetched_no_more_and_its_bytes_are_free(ahead: LookAhead, fetches: Fetches) -> None:
    ahead.announce(jobs(range(8)))
    wait_for(lambda: len(fetches.begun) == 8, "eight files")
    fetches.go.clear()
    ahead.announce(jobs(range(8, 40)))
    wait_for(lambda: len(fetches.begun) == 10, "what the budget permits")
    ahead.cancel()  # eight are there, two are under way, the others wait
    assert not any(ahead.knows(index) for index in range(40)) and ahead._held == 0
    ahead.announce(jobs(range(50, 90)))
    wait_for(lambda: len(fetches.begun) == 14, "as many at once as there are threads")
    fetches.go.set()
    for index in range(50, 90):
        assert ahead.take(index, 100).data == bytes(100)
    assert sorted(fetches.begun) == [*range(10), *range(50, 90)]
