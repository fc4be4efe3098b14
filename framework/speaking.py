"""How commands speak: results on stdout, remarks and progress on stderr.

Guarantee: text from files is shown as it is, never taken for markup or for control codes of a terminal. JSON is strict:
numbers that are not finite are texts. Nothing here needs torch.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

PIPE_WIDTH = 240  # of a table that no terminal limits
_CONTROLS = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f]")
Report = Callable[[int], None]


def say(text: str) -> None:
    """A line of the result."""
    print(plain(text))


def note(text: str) -> None:
    """A remark, which is not part of the result."""
    print(plain(text), file=sys.stderr)


def plain(text: str) -> str:
    """Text in which nothing steers a terminal."""
    return _CONTROLS.sub("�", text)


def answer(arguments: Namespace, facts: Mapping[str, Any], *lines: str) -> None:
    """The result as JSON, where that was asked for, or in words."""
    if arguments.json:
        print_json(facts)
    else:
        for line in lines:
            say(line)


def print_json(value: Any) -> None:
    """Any value of JSON's kinds."""
    print(json.dumps(strict(value), indent=1, allow_nan=False))


def strict(value: Any) -> Any:
    """The value with numbers that are not finite as texts."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): strict(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [strict(one) for one in value]
    return value


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """A table; columns whose names begin with `>` are aligned to the right. Empty ones are left out."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    class Piped(Console):
        def on_broken_pipe(self) -> None:
            raise  # rich would exit with 1

    table = Table(title=Text(plain(title)), title_justify="left", box=SIMPLE_HEAD, padding=(0, 1), pad_edge=False)
    filled = [number for number in range(len(columns)) if any(row[number] for row in rows)]
    for number in filled:
        name = columns[number].removeprefix(">")
        is_number = name != columns[number]
        table.add_column(name, justify="right" if is_number else "left", overflow="fold", no_wrap=is_number)
    for row in rows:
        table.add_row(*(Text(plain(row[number])) for number in filled))
    Piped(width=None if sys.stdout.isatty() else PIPE_WIDTH).print(table)


@contextlib.contextmanager
def progress(what: str, total: int) -> Iterator[Report]:
    """A bar of bytes on stderr, where that is a terminal.

    Yields:
        What to call with each number of bytes that is done; from any thread.
    """
    if not sys.stderr.isatty():
        yield lambda count: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (
        TextColumn("{task.description}", markup=False), BarColumn(), DownloadColumn(), TransferSpeedColumn(),
        TimeRemainingColumn(),
    )  # fmt: skip
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(plain(what), total=total)
        yield lambda count: bar.advance(task, count)


def count_text(number: int, what: str) -> str:
    """`1 attempt`, `2,000 attempts`."""
    return f"{number:,} {what}{'s' * (number != 1)}"


def size_text(size: int) -> str:
    """`12.3 MB`."""
    from rich.filesize import decimal

    return decimal(size)


def age_text(then: float) -> str:
    """How long ago a moment was, in seconds since the epoch, by this host's clock."""
    seconds = time.time() - then
    for unit, length in (("d", 86400.0), ("h", 3600.0), ("min", 60.0)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{max(seconds, 0.0):.0f} s"
