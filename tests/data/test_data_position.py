"""Which positions a step consumes, and where the next one begins."""

from __future__ import annotations

import logging

import pytest
from hypothesis import given
from hypothesis import strategies as st

from framework.data import position
from framework.data.position import Token, advance, check, window_tokens
from framework.errors import ConfigError, DataError


def positions(token: Token) -> list[int]:
    return [token.start + i * token.stride for i in range(token.count)]


@given(st.integers(0, 10**9), st.integers(1, 200), st.integers(1, 64), st.integers(1, 9))
def test_ranks_and_micro_batches_share_out_a_window_exactly(start: int, size: int, micro: int, world: int) -> None:
    shares = [window_tokens(start, size, micro, rank, world) for rank in range(world)]
    taken = [each for tokens in shares for token in tokens for each in positions(token)]
    assert sorted(taken) == list(range(start, start + size))
    for rank, tokens in enumerate(shares):
        own = [each for token in tokens for each in positions(token)]
        assert own == list(range(start + rank, start + size, world))
        assert all(token.count == micro for token in tokens[:-1])
        assert all(1 <= token.count <= micro for token in tokens)


def test_carry_goes_on_into_the_next_epoch_and_drop_does_not() -> None:
    assert [advance(p, 4, 10, "carry") for p in (0, 4, 8)] == [4, 8, 12]
    assert [advance(p, 4, 10, "drop") for p in (0, 4, 10)] == [4, 10, 14]
    assert advance(8, 4, 12, "drop") == 12


def test_drop_after_a_change_of_batch_size_begins_with_the_next_epoch() -> None:
    assert advance(8, 4, 10, "drop") == 14  # from 8 only two samples remain: the step takes 10 to 14


@given(st.integers(1, 50), st.integers(1, 50), st.integers(0, 500))
def test_drop_never_takes_a_step_over_the_end_of_an_epoch(samples: int, size: int, start: int) -> None:
    if size > samples:
        return
    first = position.window_start(start, size, samples, "drop")
    assert first // samples == (first + size - 1) // samples
    following = advance(start, size, samples, "drop")
    assert following == position.window_start(following, size, samples, "drop") > start


def test_too_little_data_is_an_error_with_both_numbers() -> None:
    with pytest.raises(DataError, match="empty"):
        check(0, 4, "carry")
    with pytest.raises(DataError, match="3 samples, fewer than one global batch of 4"):
        check(3, 4, "drop")
    with pytest.raises(ConfigError, match=r"loader\.epoch_end='wrap'"):
        check(3, 4, "wrap")
    with pytest.raises(ConfigError, match="at least 1"):
        check(3, 0, "carry")


def test_a_small_dataset_under_carry_is_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        check(31, 77, "carry")
        check(31, 77, "carry")
    assert [record.getMessage() for record in caplog.records] == [
        "The dataset has 31 samples, fewer than one global batch of 77: every step spans more than one epoch."
    ]
