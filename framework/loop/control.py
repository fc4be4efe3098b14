"""Requests to the loop, and how all ranks come to the same ones at the same step.

Guarantee: a request made on any rank takes effect on all ranks after the same step. Ranks exchange a control word
asynchronously on the CPU, so often that at least 100 ms pass in between, and read it when they post the next one: in
a running job nobody waits for it.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from framework.distributed import Group

SPACING_SECONDS = 0.1
MAX_SPACING = 10_000
_STOP, _EXIT_CODE, _SAVE, _EVAL, _ROLLBACK, _SPACING = range(6)


@dataclass
class Requests:
    """What has been asked for, with who asked for it.

    Args:
        stop: Reason to stop after this step, or the empty string.
        exit_code: Exit code of the process when stopped for that reason.
        save: Reason to save.
        eval: Reason to evaluate.
        rollback: Reason to go back to the newest checkpoint.
    """

    stop: str = ""
    exit_code: int = 0
    save: str = ""
    eval: str = ""
    rollback: str = ""

    def __bool__(self) -> bool:
        return bool(self.stop or self.save or self.eval or self.rollback)

    def joined(self, other: Requests) -> Requests:
        """What either asks for; the reasons of this one are kept, the larger exit code wins."""
        return Requests(
            self.stop or other.stop,
            max(self.exit_code, other.exit_code),
            self.save or other.save,
            self.eval or other.eval,
            self.rollback or other.rollback,
        )


@dataclass
class _Posted:
    word: torch.Tensor
    work: dist.Work
    step: int
    at: float = field(default_factory=time.monotonic)


class Control:
    """Collects requests of this rank and hands out those that all ranks agreed on.

    Args:
        group: A group used for nothing else; with one rank requests take effect at once.
    """

    def __init__(self, group: Group) -> None:
        self._group = group
        self._mine = Requests()
        self._is_asked = False  # asking a flag is all that a step without requests costs
        self._posted: _Posted | None = None
        self._spacing = 1

    @property
    def stop_requested_here(self) -> bool:
        """Whether this rank itself was asked to stop, agreed or not."""
        return bool(self._mine.stop)

    @property
    def is_in_a_hurry(self) -> bool:
        """Whether this rank itself was asked to stop with an exit code other than 0, as by a signal."""
        return bool(self._mine.stop) and self._mine.exit_code != 0

    def stop(self, reason: str, exit_code: int = 0) -> None:
        """Asks to stop after the current step. The first reason is kept, the larger exit code wins."""
        self._mine.stop = self._mine.stop or reason
        self._is_asked = True
        self._mine.exit_code = max(self._mine.exit_code, exit_code)

    def save(self, reason: str) -> None:
        """Asks for a save after the current step."""
        self._mine.save = self._mine.save or reason
        self._is_asked = True

    def eval(self, reason: str) -> None:
        """Asks for an evaluation after the current step."""
        self._mine.eval = self._mine.eval or reason
        self._is_asked = True

    def rollback(self, reason: str) -> None:
        """Asks to go back to the newest checkpoint after the current step."""
        self._mine.rollback = self._mine.rollback or reason
        self._is_asked = True

    def agreed(self, step: int) -> Requests | None:
        """Requests that take effect after `step`, on every rank the same; none if there are none.

        All ranks call this after every step.
        """
        if self._group.handle is None:
            if not self._is_asked:
                return None
            self._is_asked = False
            mine, self._mine = self._mine, Requests()
            return mine
        posted = self._posted
        if posted is None:
            self._post(step)
            return None
        if step < posted.step + self._spacing:
            return None
        posted.work.wait()
        return self._read(posted, step)

    def agreed_now(self, step: int) -> Requests:
        """Like `agreed`, for the rare moment at which all ranks know that there is a request: they wait for each other."""
        if self._group.handle is None:
            return self.agreed(step) or Requests()
        if self._posted is None:
            self._post(step)
        total = Requests()
        for _ in range(2):  # a word that is on its way may be older than the request
            self._spacing = 0
            total = total.joined(self.agreed(step) or Requests())
        return total

    def close(self) -> None:
        """Forgets a word that is still on its way."""
        self._posted = None

    def _post(self, step: int) -> None:
        mine = self._mine
        word = torch.zeros(6, dtype=torch.int64)
        word[_STOP], word[_EXIT_CODE], word[_SAVE] = bool(mine.stop), mine.exit_code, bool(mine.save)
        word[_EVAL], word[_ROLLBACK], word[_SPACING] = bool(mine.eval), bool(mine.rollback), self._proposal(step)
        work = dist.all_reduce(word, op=dist.ReduceOp.MAX, group=self._group.handle, async_op=True)
        assert work is not None
        self._posted = _Posted(word, work, step)

    def _proposal(self, step: int) -> int:
        """Steps between two words such that at least `SPACING_SECONDS` pass, by this rank's pace."""
        if self._posted is None:
            return 1
        pace = (time.monotonic() - self._posted.at) / max(1, step - self._posted.step)
        return min(MAX_SPACING, max(1, round(SPACING_SECONDS / max(pace, 1e-9))))

    def _read(self, posted: _Posted, step: int) -> Requests | None:
        stop, exit_code, save, evaluate, rollback, spacing = posted.word.tolist()
        mine = self._mine
        agreed = Requests(
            stop=(mine.stop or "requested by another rank") if stop else "",
            exit_code=exit_code,
            save=(mine.save or "requested by another rank") if save else "",
            eval=(mine.eval or "requested by another rank") if evaluate else "",
            rollback=(mine.rollback or "requested by another rank") if rollback else "",
        )
        # what was asked for after the word was posted stays for the next one
        self._mine = Requests(
            stop="" if stop else mine.stop,
            exit_code=0 if stop else mine.exit_code,
            save="" if save else mine.save,
            eval="" if evaluate else mine.eval,
            rollback="" if rollback else mine.rollback,
        )
        self._spacing = spacing
        self._post(step)
        return agreed if agreed else None
