"""Follows a run in the terminal.

Guarantee: reads the journal and changes nothing. Every event that matters is told once, in the order of the journal, as
a plain line; on a terminal a panel below these lines has the figures up to now.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from framework.goodput.accounts.ledger import Ledger
from framework.goodput.accounts.results import Goodput
from framework.goodput.reporting import palette
from framework.goodput.reporting.words import biggest_losses, duration, first_line, ranked
from framework.goodput.tracking.tail import JournalTail
from framework.rundir import RunDirectory
from framework.speaking import count_text, plain

if TYPE_CHECKING:
    from rich.console import RenderableType

POLL_SECONDS = 0.5
STATUS_SECONDS = 10.0  # between lines with figures, where there is no panel
Tell = Callable[[str], None]


class Watched:
    """What is known of a run so far.

    Args:
        run_dir: The run directory; it need not exist yet.
    """

    def __init__(self, run_dir: Path | str) -> None:
        self.run = RunDirectory(run_dir)
        self.ledger = Ledger()
        self.total_steps: int | None = None
        self._tail = JournalTail(self.run.events)
        self._told_dead = 0

    def news(self) -> Iterator[str]:
        """Lines about what came since the last call."""
        is_live = self.is_live()  # asked first: what the process wrote before it ended is read below
        for event in self._tail.read():
            self.ledger.add(event)
            if event["ev"] == "train_start" and type(event.get("total_steps")) is int:
                self.total_steps = event["total_steps"]
            words = _words(event)
            if words:
                yield f"{time.strftime('%H:%M:%S', time.localtime(event['t']))} {words}"
        newest = self.ledger.attempts[-1] if self.ledger.attempts else None
        if newest is not None and newest.end is None and not is_live and self._told_dead < newest.number:
            self._told_dead = newest.number
            yield f"attempt {newest.number} is gone, and left no word: kill -9, out of memory, or its host was lost"

    def is_live(self) -> bool:
        """Whether a process trains now."""
        owner = self.run.owner()
        return owner is not None and owner.is_live and owner.owns(self.run.path)

    def is_over(self, with_restarts: bool) -> bool:
        """Whether there is nothing more to wait for; to be asked after `news`."""
        if not self.ledger.attempts:
            return False
        newest = self.ledger.attempts[-1]
        if newest.end is not None:
            return not with_restarts or newest.end.get("status") == "finished"
        return not with_restarts and self._told_dead == newest.number

    def status(self) -> str:
        """The figures up to now, in one line."""
        goodput = self._goodput()
        total = "" if self.total_steps is None else f" of {self.total_steps:,}"
        parts = [f"step {goodput.steps_done:,}{total}", f"goodput {goodput.ratio:.1%} of {duration(goodput.wall)}"]
        parts += biggest_losses(goodput)
        if goodput.steps_lost:
            parts.append(f"{goodput.steps_lost:,} done twice")
        if goodput.checkpoint_age is not None:
            parts.append(f"checkpoint at step {goodput.committed_step:,}, {duration(goodput.checkpoint_age)} old")
        return " · ".join(parts)

    def panel(self) -> RenderableType:
        """The figures up to now, for a terminal."""
        from rich.panel import Panel
        from rich.table import Table
        from rich.text import Text

        goodput = self._goodput()
        table = Table.grid(padding=(0, 2))
        most = max(goodput.seconds.values(), default=0.0) or 1.0
        for name, seconds in ranked(goodput)[:6]:
            bar = Text("█" * max(1, round(24 * seconds / most)), style=palette.CATEGORIES[name])
            table.add_row(name, bar, duration(seconds), f"{seconds / (goodput.wall or 1):.1%}")
        title = f"{self.run.path.name} · attempt {self.ledger.attempts[-1].number} · goodput {goodput.ratio:.1%}"
        return Panel(table, title=Text(plain(title)), subtitle=Text(self.status()), expand=False)

    def _goodput(self) -> Goodput:
        newest = self.ledger.attempts[-1]
        return self.ledger.total(time.time() if newest.end is None and self.is_live() else None)


def follow(run_dir: Path | str, with_restarts: bool = False) -> None:
    """Tells how a run goes, until its attempt ends, or Ctrl-C.

    Args:
        run_dir: The run directory; one that does not exist yet is waited for.
        with_restarts: Whether to go on after an attempt that ended, until the run is finished.
    """
    watched = Watched(run_dir)
    with contextlib.suppress(KeyboardInterrupt):
        if sys.stdout.isatty():
            _on_terminal(watched, with_restarts)
        else:
            _into_pipe(watched, with_restarts)


def _into_pipe(watched: Watched, with_restarts: bool) -> None:
    due = time.monotonic() + STATUS_SECONDS
    for _ in _rounds(watched, with_restarts, _line):
        if time.monotonic() >= due and watched.ledger.attempts:
            due = time.monotonic() + STATUS_SECONDS
            _line(watched.status())
    if watched.ledger.attempts:
        _line(watched.status())


def _on_terminal(watched: Watched, with_restarts: bool) -> None:
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    console = Console(highlight=False)
    with Live(console=console, auto_refresh=False) as live:
        for _ in _rounds(watched, with_restarts, lambda line: console.print(Text(plain(line)))):
            if watched.ledger.attempts:
                live.update(watched.panel(), refresh=True)


def _rounds(watched: Watched, with_restarts: bool, tell: Tell) -> Iterator[None]:
    """Tells the news; yields after each look, the last one included."""
    has_waited = False
    while True:
        for line in watched.news():
            tell(line)
        yield
        if watched.is_over(with_restarts):
            return
        if not watched.ledger.attempts and not has_waited:
            has_waited = True
            tell(f"{watched.run.shown} has not begun yet: waiting for its first event")
        time.sleep(POLL_SECONDS)


def _line(text: str) -> None:
    print(plain(text), flush=True)


def _words(event: Mapping[str, Any]) -> str:
    """An event as a line, empty for one that is not worth it. Whatever its fields hold, it is text."""
    number, step = event["att"], event.get("step")
    match event["ev"]:
        case "attempt_start":
            ranks = event.get("world_size")
            words = count_text(ranks, "rank") if type(ranks) is int else "? ranks"
            return f"attempt {number} began on {event.get('host', '?')}, {words}"
        case "restored":
            return f"attempt {number} goes on from step {step}"
        case "save_committed":
            return f"step {step}: saved{_cost(event)}"
        case "save_failed":
            return f"step {step}: a save failed: {first_line(event.get('error'))}"
        case "interval":
            return f"step {step}: saves every {event.get('seconds')} s: {first_line(event.get('reason'))}"
        case "failure":
            return (
                f"attempt {number} failed at step {step}: {event.get('type', '')}: {first_line(event.get('message'))}"
            )
        case "end":
            return f"attempt {number} ended at step {step}: {event.get('status')} ({first_line(event.get('reason'))})"
    return ""


def _cost(event: Mapping[str, Any]) -> str:
    stall, persist = event.get("stall_seconds"), event.get("persist_seconds")
    is_known = type(stall) is float and type(persist) is float
    return f", {stall:.2g} s in the way of the steps, durable {persist:.2g} s later" if is_known else ""
