"""Runs a command again and again until it goes through, as a launcher does.

Guarantee: an attempt either ends with exit code 0 or was killed by SIGKILL; any other end fails the test.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Mapping
from pathlib import Path

from support.comparison import compare
from support.idlog import kept
from support.processes import WAIT_SECONDS, Run, start

OVER = "Nothing to do"  # says a run that is started again though its last step is published


def endure(
    *words: str, cwd: Path, ranks: int = 1, env: Mapping[str, str] | None = None, timeout: float = WAIT_SECONDS
) -> list[Run]:
    """Starts the same command until it ends with 0: once more than it has kills (see `kill_at`) in it.

    After a kill of one rank all others are killed too. Each attempt must leave the run further than, or as far as, it
    was: the kills have to be reached. Only a run whose last step was published before it was killed is over before all
    of them: on a busy machine saves in the middle are left out, and a kill that waits for a commit may meet the last.

    Args:
        words: The words of the command.
        cwd: Where it runs.
        ranks: How many there are.
        env: What is added to its environment.
        timeout: How long one attempt may take, seconds.

    Returns:
        All attempts; all but the last were killed.

    Raises:
        AssertionError: A kill did not happen, or an attempt ended otherwise.
    """
    kills = sum("job_callbacks.KillAt" in word and "number: SIGKILL" in word for word in words)
    attempts = []
    for _ in range(kills):
        run = start(*words, cwd=cwd, ranks=ranks, env=env)
        try:
            killed(run, timeout)
        except AssertionError:
            if attempts and OVER in run.output():
                return [*attempts, run.ends(0)]
            raise
        attempts.append(run)
    return [*attempts, start(*words, cwd=cwd, ranks=ranks, env=env).ends(0, timeout)]


def killed(run: Run, timeout: float = WAIT_SECONDS) -> Run:
    """Waits until some rank was killed by SIGKILL, then kills the others.

    Raises:
        AssertionError: All ended otherwise, or it took too long.
    """
    deadline = time.monotonic() + timeout
    while run.wait_any(deadline - time.monotonic()):
        if -signal.SIGKILL in run.codes.values():
            run.kill_all()
            return run
    raise AssertionError(f"no rank was killed; exit codes {run.codes}\n{run.output()}")


def assert_same(unbroken: Path, other: Path, ranks: int = 1) -> None:
    """Same bits at the end, same loss and learning rate of every step, same samples in every step of every rank."""
    differences = compare(unbroken, other)
    assert not differences, "\n".join(map(str, differences[:20]))
    for rank in range(ranks):
        expected, got = kept(unbroken, rank), kept(other, rank)
        assert list(got) == list(expected)
        for step, line in expected.items():
            assert (got[step].ids, got[step].epoch, got[step].loss, got[step].lr) == (
                line.ids,
                line.epoch,
                line.loss,
                line.lr,
            ), f"step {step} of rank {rank}"
