"""Several real ranks that a test leads from pause to pause.

with Ranks(2, body, path) as ranks:       # body(world, group, pause, path); `pause()` waits for the test
    ranks.meet()                          # all are in their first pause
    ...                                   # break something
    ranks.go()
    answers = ranks.results()             # what each returned
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fault_support import ended, fork, join

BOUND = 120.0
SECONDS = 30.0


class Ranks:
    """The ranks, forked; they are dead when the block is left."""

    def __init__(self, size: int, body: Callable[..., Any], *arguments: Any) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self.pids: list[int] = []
        self._pipes = []
        for rank in range(size):
            ours, theirs = multiprocessing.Pipe()
            self.pids.append(fork(lambda rank=rank, pipe=theirs: self._run(rank, size, pipe, body, arguments)))
            theirs.close()
            self._pipes.append(ours)

    def _run(self, rank: int, size: int, pipe: Any, body: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        def pause() -> None:
            pipe.send(("pause", None))
            assert pipe.poll(BOUND), "the test never went on"
            pipe.recv()

        try:
            world, group = join(rank, size, Path(self._folder.name) / "store", SECONDS)
            pipe.send(("done", body(world, group, pause, *arguments)))
        except BaseException:
            pipe.send(("error", traceback.format_exc()))

    def meet(self) -> None:
        """Waits until all are in a pause."""
        for pipe in self._pipes:
            self._receive(pipe, "pause")

    def go(self) -> None:
        for pipe in self._pipes:
            pipe.send("go")

    def results(self) -> list[Any]:
        """What the bodies returned, by rank."""
        return [self._receive(pipe, "done") for pipe in self._pipes]

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *error: object) -> None:
        for pid in self.pids:
            if error[0] is not None:
                os.kill(pid, 9)
            ended(pid, BOUND)
        for pipe in self._pipes:
            pipe.close()
        self._folder.cleanup()

    @staticmethod
    def _receive(pipe: Any, expected: str) -> Any:
        assert pipe.poll(BOUND), f"no {expected} in time"
        kind, value = pipe.recv()
        assert kind == expected, value
        return value
