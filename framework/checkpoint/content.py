"""What goes into a checkpoint, and what comes out of saving one.

Guarantee: these records hold references and numbers only; making one copies no tensor and touches no file.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class TrainState:
    """The state of a run at a step.

    Args:
        tensors: Nested mappings whose leaves are the live tensors, e.g. `{"model": {"fc.weight": tensor}}`; stored
            under the joined key `model.fc.weight`. Any shape, dtype and device; tensors that share their memory are
            stored once. Replicas may be given on every rank or on some; only one of them is written.
        shared: Python values that are the same on all ranks; rank 0's are written. Numbers, strings, lists, dicts
            and tensors: what `torch.load(weights_only=True)` reads.
        rank: This rank's own values, of the same kinds; one file per rank.
        settled: Joined keys of tensors that nothing but an update changes: trained parameters, their moments and
            averages. They may be copied beside the next forward and backward; all others are copied at once.
    """

    tensors: Mapping[str, Any]
    shared: Mapping[str, Any] = field(default_factory=dict)
    rank: Mapping[str, Any] = field(default_factory=dict)
    settled: Collection[str] = ()


@dataclass(frozen=True, slots=True)
class SaveHeader:
    """What a checkpoint says about itself; the same on all ranks.

    Args:
        step: Completed optimizer steps.
        position: Samples consumed over all epochs.
        epoch: The epoch that `position` lies in.
        skipped: Steps whose update was left out.
        reason: Why it is saved: `schedule`, `final`, `signal`, …
        metrics: Latest values by name.
        finished: Set when the run is complete: what ended it, e.g. `max_steps`.
        elapsed_seconds: Training time over all attempts.
        extra: Further fields of the manifest, JSON values.
        pinned: Whether retention must keep it for ever.
        health: What is known of the numbers in it, or none.
    """

    step: int
    position: int = 0
    epoch: int = 0
    skipped: int = 0
    reason: str = "schedule"
    metrics: Mapping[str, float] = field(default_factory=dict)
    finished: str | None = None
    elapsed_seconds: float = 0.0
    extra: Mapping[str, Any] = field(default_factory=dict)
    pinned: bool = False
    health: str | None = None


@dataclass(frozen=True, slots=True)
class SaveResult:
    """How a save ended; the same on all ranks.

    Args:
        step: The saved step.
        path: Folder of the checkpoint.
        committed: Whether it is published and durable. Only then may "saved" be said.
        error: What went wrong, on which rank and where; none if committed.
        bytes: Size of all files over all ranks.
        stall_seconds: How long `start` held up the step loop, on the slowest rank.
        persist_seconds: From the end of the stall to the commit.
        captured: Wall clock of the state, in seconds since the epoch.
        tier: Where it is committed: `local`, `remote`, or `both`.
        upload_seconds: How long the upload took; none without one.
        local: Whether a whole copy lies at `path`, even if the save failed as its upload did.
    """

    step: int
    path: Path
    committed: bool
    error: str | None
    bytes: int
    stall_seconds: float
    persist_seconds: float
    captured: float
    tier: str = "local"
    upload_seconds: float | None = None
    local: bool = False
