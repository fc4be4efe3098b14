"""Exceptions users can catch, and the exit codes of a run.

Guarantee: every error that the framework raises on purpose derives from `FrameworkError`, and its message says what
is wrong with which value, where it came from, and what to do.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

EXIT_DONE = 0
EXIT_ERROR = 1
EXIT_REQUEUE = 75  # SIGUSR1: saved, start me again
EXIT_SIGINT = 130
EXIT_SIGTERM = 143


class FrameworkError(Exception):
    """Base of all errors that the framework raises on purpose."""

    exit_code = EXIT_ERROR


class ConfigError(FrameworkError):
    """A value in the configuration is wrong. Nothing has been created on disk."""


class BuildError(FrameworkError):
    """A user's factory (model, data) failed while it ran; the original error is the cause."""


class DataError(FrameworkError):
    """The data cannot be used as configured: missing, empty, damaged, or changed."""


class CheckpointError(FrameworkError):
    """A checkpoint cannot be written or read."""


class StateMismatchError(CheckpointError):
    """A checkpoint is intact but does not fit the model, optimizer or data of this run."""


class RunOwnedError(FrameworkError):
    """Another live process owns the run directory."""


class NonFiniteError(FrameworkError):
    """The loss or the gradient norm is not finite."""


class DistributedError(FrameworkError):
    """The ranks could not join or agree in time."""


def suggest(name: str, known: Iterable[str]) -> str:
    """A ` Did you mean 'x'?` for the nearest known name, or the empty string."""
    near = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f" Did you mean '{near[0]}'?" if near else ""
