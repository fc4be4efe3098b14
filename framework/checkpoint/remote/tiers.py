"""Local and remote checkpoints of a run as one list, and how a restart gets what it needs of it.

Guarantee: candidates come newest first from both tiers. A remote checkpoint is used only when it lies here whole, every
byte compared with its manifest. Of two different ones of the same step the one that was written later wins. A place
that cannot be reached is an error, not an empty place. All ranks get the same answers.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from framework.checkpoint import files
from framework.checkpoint.files import DamagedError
from framework.checkpoint.manifest import METADATA
from framework.checkpoint.remote.listing import Copy
from framework.checkpoint.store import Found
from framework.ending import Background
from framework.errors import CheckpointError, FrameworkError

if TYPE_CHECKING:
    from framework.checkpoint.remote.tier import RemoteTier

log = logging.getLogger(__name__)
LOCAL, REMOTE, BOTH = "local", "remote", "both"
MEET_SECONDS = 2.0


@dataclass(frozen=True, slots=True)
class Candidate:
    """A checkpoint of a run, wherever it lies.

    Args:
        step: Completed optimizer steps.
        local: The one in the run directory, or none.
        remote: The one in the remote place, or none.
        is_same: Whether both are the same save.
    """

    step: int
    local: Found | None = None
    remote: Copy | None = None
    is_same: bool = False

    @property
    def tier(self) -> str:
        """Where it lies: `local`, `remote` or `both`. Of two different saves of a step the one that is used counts."""
        if self.local is None or self.remote is None:
            return REMOTE if self.local is None else LOCAL
        if self.is_same:
            return BOTH if self.local.header is not None and self.remote.header is not None else self._whole
        return LOCAL if self.prefers_local else REMOTE

    @property
    def _whole(self) -> str:
        return LOCAL if self.local is not None and self.local.header is not None else REMOTE

    @property
    def prefers_local(self) -> bool:
        """Whether the remote one is not needed, as far as sizes and manifests tell."""
        if self.local is None or self.local.header is None:
            return False
        if self.remote is None or self.remote.header is None:
            return True
        return not self.is_same and self.local.header.created > self.remote.header.created


def merge(local: Sequence[Found], remote: Sequence[Copy]) -> list[Candidate]:
    """Both tiers by step, newest first."""
    here, there = {found.step: found for found in local}, {copy.step: copy for copy in remote}
    merged = []
    for step in sorted({*here, *there}, reverse=True):
        found, copy = here.get(step), there.get(step)
        is_same = found is not None and copy is not None and _is_same(found, copy)
        merged.append(Candidate(step, found, copy, is_same))
    return merged


def _is_same(found: Found, copy: Copy) -> bool:
    try:
        return files.read(found.path / METADATA) == copy.metadata
    except DamagedError:
        return False


def candidates(remote: RemoteTier) -> list[Path]:
    """Where the checkpoints of both tiers lie, or will lie once they were fetched; newest first. A collective.

    Raises:
        CheckpointError: A place cannot be listed; the same on all ranks.
    """

    def listed() -> list[Path]:
        merged = merge(remote.store.list(), remote.list())
        remote.known = {one.step: one for one in merged}
        for one in merged:
            if one.local is not None and one.remote is not None and not one.is_same:
                _announce(one)
        return [remote.store.folder(one.step) for one in merged]

    return remote.on_main(listed)


def _announce(one: Candidate) -> None:
    assert one.local is not None and one.remote is not None
    used, other = one.local.path, one.remote.place
    if not one.prefers_local:
        used, other = one.remote.place, one.local.path  # type: ignore[assignment]
    log.warning(
        "step %d was saved twice: %s is used, since it is newer than %s, or that is damaged", one.step, used, other
    )


def bring(remote: RemoteTier, folder: Path, *, is_thorough: bool = False) -> str | None:
    """Sees to it that a candidate lies in the local store of every host. A collective.

    Args:
        remote: The remote tier, after `candidates`.
        folder: One of its answers.
        is_thorough: Also compare the checksums of what lies here, and fetch what is damaged.

    Returns:
        What keeps it from being used; none if it can be verified now. With `is_thorough` none says that something was
        repaired.

    Raises:
        CheckpointError: It cannot be fetched, though nothing is wrong with it: the place cannot be reached, or the
            local disk is full.
    """
    step = int(folder.name.removeprefix("step_"))
    candidate = remote.on_main(lambda: remote.known.get(step, Candidate(step)))
    copy = candidate.remote
    answers = _all_bring(remote, lambda mine: _bring_here(remote, candidate, folder, is_thorough, mine))
    if failed := next((answer.problem for answer in answers if answer.problem), None):
        raise CheckpointError(failed)
    reason = next((answer.reason for answer in answers if answer.reason), None)
    if reason is not None and copy is not None:
        if copy.header is not None:
            remote.damaged[step] = reason
        if remote.world.is_main:
            log.warning("the copy in %s cannot be used, and stays there: %s", copy.place, reason)
    _tell_of_repairs(remote, folder, candidate, answers)
    if reason is None and is_thorough and not any(answer.fetched for answer in answers):
        return "nothing to repair"
    return reason


def blame(remote: RemoteTier, found: Found, reason: str) -> None:
    """Notes on rank 0 that a remote copy is no better than what lies here, if both are the same save.

    Args:
        remote: The remote tier, after `bring` with `is_thorough`.
        found: What was found damaged here.
        reason: What is wrong with it.
    """
    copy = remote.known.get(found.step, Candidate(found.step)).remote
    if copy is not None and copy.header is not None and _is_same(found, copy):
        remote.damaged.setdefault(found.step, reason)


@dataclass(slots=True)
class _Answer:
    """What one rank says of its host's part.

    Args:
        reason: What is wrong with the remote copy.
        problem: What failed.
        fetched: Bytes that were fetched.
        repaired: What was wrong with the local copy before.
    """

    reason: str | None = None
    problem: str | None = None
    fetched: int = 0
    repaired: list[str] = field(default_factory=list)


def _tell_of_repairs(remote: RemoteTier, folder: Path, one: Candidate, answers: Sequence[_Answer]) -> None:
    for rank, answer in enumerate(answers):
        if answer.repaired and one.remote is not None:
            text = "; ".join(answer.repaired)
            remote.repaired.append((folder, f"rank {rank}: {text}" if len(answers) > 1 else text))
            if remote.world.is_main:
                log.warning("%s was damaged, and repaired from %s: %s", folder, one.remote.place, text)


def _all_bring(remote: RemoteTier, work: Callable[[_Answer], None]) -> list[_Answer]:
    """Lets one rank of each host work, and all meet again and again meanwhile: a long fetch is no missing rank."""
    mine = _Answer()

    def run() -> None:
        try:
            work(mine)
        except (FrameworkError, OSError) as error:
            mine.problem = str(error)
        except Exception as error:  # every rank must hear of it, whatever it is
            mine.problem = f"{type(error).__name__}: {error}"

    is_leader = remote.homes().leaders[remote.world.rank] == remote.world.rank
    thread = Background(run, "fetch")
    if is_leader:
        thread.start()
    while True:
        if is_leader:
            thread.join(MEET_SECONDS)
        answers = remote.group.all_gather((thread.is_alive(), mine))
        if not any(is_working for is_working, _ in answers):
            return [answer for _, answer in answers]


def _bring_here(remote: RemoteTier, one: Candidate, folder: Path, is_thorough: bool, mine: _Answer) -> None:
    """One host's part; `mine` gets what is wrong, what was fetched and what that repaired."""
    from framework.checkpoint.remote import fetch  # needs torch, and listing does not

    copy = one.remote
    if copy is None or (one.prefers_local and not is_thorough):
        found = remote.store.look(folder)
        mine.reason = None if found.header is not None else found.damage or "it is not here"
        return
    if copy.header is None:
        mine.reason = f"{copy.place}: {copy.damage}"
        return
    try:
        mine.fetched = fetch.fetch(remote.volume, copy, remote.store, is_thorough=is_thorough, damaged=mine.repaired)
    except DamagedError as error:
        mine.reason = str(error)
