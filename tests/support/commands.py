"""Words of the command line that tests add."""

from __future__ import annotations


def kill_at(
    step: int, phase: str, *, rank: int = 0, number: str = "SIGKILL", count: int = 0, name: str = "kill"
) -> str:
    """Adds the callback `job_callbacks.KillAt`: one signal at one place, once in the life of the run.

    Args:
        step: The step during which, counted from 1.
        phase: Where in it; see `job_callbacks.KillAt`.
        rank: On which rank.
        number: Name of the signal.
        count: The how-manieth time in that step, from 0.
        name: Key of the callback; several kills need several.
    """
    options = f"step: {step}, phase: {phase}, rank: {rank}, number: {number}, count: {count}"
    return f"+callbacks.{name}={{_target_: job_callbacks.KillAt, {options}}}"


def slow_save(*, write: float = 0.0, commit: float = 0.0, stall: float = 0.0) -> str:
    """Adds the callback `job_callbacks.SlowSave`: each save sleeps before it writes, before it publishes, and while the
    state is taken, in seconds."""
    options = f"write_seconds: {write}, commit_seconds: {commit}, stall_seconds: {stall}"
    return f"+callbacks.slow={{_target_: job_callbacks.SlowSave, {options}}}"


def settle() -> str:
    """Adds the callback `job_callbacks.Settle`: saves are waited for, so that every one that is due is committed."""
    return "+callbacks.settle={_target_: job_callbacks.Settle}"
