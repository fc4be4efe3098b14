"""Tells the story of a run as journal events, on clocks that the test turns."""

from __future__ import annotations

from typing import Any


class Story:
    """Writes events like rank 0 does; time passes only when the story says so.

    Args:
        wall: Wall clock at the beginning, seconds since the epoch.
    """

    def __init__(self, wall: float = 1_800_000_000.0) -> None:
        self.wall, self.monotonic, self.boot = wall, 5_000.0, "boot-a"
        self.attempt = 0
        self.ranks = 1
        self.step = 0
        self.events: list[dict[str, Any]] = []
        self._seq = 0
        self._block: dict[str, Any] | None = None

    def wait(self, seconds: float) -> Story:
        self.wall += seconds
        self.monotonic += seconds
        return self

    def set_clock(self, seconds: float) -> Story:
        """Somebody sets the wall clock forward or back."""
        self.wall += seconds
        return self

    def on(self, ranks: int) -> Story:
        """The attempts from now on have so many ranks."""
        self.ranks = ranks
        return self

    def reboot(self) -> Story:
        self.monotonic, self.boot = 10.0, self.boot + "'"
        return self

    def event(self, name: str, /, **fields: Any) -> Story:
        line = {"v": 1, "seq": self._seq, "t": self.wall, "m": self.monotonic, "att": self.attempt, "ev": name}
        self.events.append(line | fields)
        self._seq += 1
        return self

    def launch(self, after: float = 0.0, **facts: Any) -> Story:
        """A new attempt begins; its process started `after` seconds before."""
        self.attempt, self._seq = self.attempt + 1, 0
        facts = {"started": self.wall, "boot_id": self.boot, "pid": 77, "world_size": self.ranks} | facts
        return self.wait(after).event("attempt_start", attempt=self.attempt, **facts)

    def start(self, *, init: float = 0.0, restored: int | None = None, restore_seconds: float = 0.0) -> Story:
        """A new attempt: process start, `init` seconds, restore, first step next."""
        self.launch(init / 2).wait(init / 2)
        if restored is not None:
            self.wait(restore_seconds).event("restored", step=restored, seconds=restore_seconds)
        self.step = restored or 0
        return self.event("train_start", step=self.step)

    def train(self, count: int, flush: bool = True, **seconds: float | list[float]) -> Story:
        """Runs steps, each with the given seconds per category, and logs them unless the process dies before."""
        columns = {k: v if isinstance(v, list) else [v] * count for k, v in seconds.items()}
        begin, first = self.wall, self.step + 1
        self.wait(sum(sum(values) for values in columns.values()))
        self.step += count
        if flush:
            self.event("steps", first=first, start=begin, seconds=columns, loss=[0.5] * count, lr=[0.1] * count)
        return self

    def commit(self, stall: float = 0.0, persist: float = 0.0) -> Story:
        return self.event(
            "save_committed", step=self.step, stall_seconds=stall, persist_seconds=persist, captured=self.wall - persist
        )

    def end(self, status: str = "finished", exit_code: int = 0) -> Story:
        return self.event("end", status=status, exit_code=exit_code, step=self.step)
