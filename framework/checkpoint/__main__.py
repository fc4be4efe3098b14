"""python -m framework.checkpoint {ls | verify} RUN: looks at the checkpoints of a run.

Guarantee: nothing is changed. `ls` needs no torch. The exit code is 0 if all that was asked for is whole, 1 if not.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from framework.errors import EXIT_DONE, EXIT_ERROR, FrameworkError


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command.

    Args:
        argv: Arguments, default those of the process.

    Returns:
        The exit code.
    """
    arguments = _parser().parse_args(argv)
    try:
        rows = _rows(arguments)
    except FrameworkError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    if arguments.json:
        print(json.dumps(rows, indent=1))
    else:
        _print(rows, arguments.run)
    return EXIT_ERROR if any(row["damage"] for row in rows) else EXIT_DONE


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m framework.checkpoint", description="Looks at checkpoints.")
    commands = parser.add_subparsers(dest="command", required=True)
    for name, text in (
        ("ls", "lists the published checkpoints of a run, newest first; file sizes are checked"),
        ("verify", "compares every byte with its checksum"),
    ):
        command = commands.add_parser(name, help=text, description=text)
        command.add_argument("run", metavar="RUN", help="the run directory")
        command.add_argument("--step", type=int, help="only the checkpoint of this step")
        command.add_argument("--json", action="store_true", help="print JSON")
    return parser


def _rows(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    from framework.checkpoint.store import CheckpointStore
    from framework.errors import CheckpointError
    from framework.rundir import RunDirectory

    run = RunDirectory(arguments.run)
    if not run.checkpoints.is_dir():
        raise CheckpointError(f"{run.path} has no folder 'checkpoints'. Give the directory of a run, runs/NAME.")
    found = CheckpointStore(run.checkpoints).list()
    if arguments.step is not None:
        steps = ", ".join(str(f.step) for f in found) or "none"
        found = [f for f in found if f.step == arguments.step]
        if not found:
            raise CheckpointError(f"{run.checkpoints} has no checkpoint of step {arguments.step}. There are: {steps}.")
    return [_row(f, run.path, is_full=arguments.command == "verify") for f in found]


def _row(found: Any, run: Path, *, is_full: bool) -> dict[str, Any]:
    damage = found.damage
    seconds = 0.0
    if is_full and damage is None:
        from framework.checkpoint.files import DamagedError
        from framework.checkpoint.verify import check_bytes, check_structure

        began = time.monotonic()
        try:
            manifest, _ = check_structure(found.path, found.step)
            check_bytes(found.path, manifest)
        except DamagedError as error:
            damage = str(error)
        seconds = time.monotonic() - began
    header = found.header
    row: dict[str, Any] = {"step": found.step, "path": str(found.path.relative_to(run)), "damage": damage}
    if header is not None:
        names = ("attempt", "position", "epoch", "world_size", "reason", "finished", "pinned", "created")
        row |= {name: getattr(header, name) for name in names} | {"bytes": header.size, "metrics": dict(header.metrics)}
    return row | ({"verify_seconds": seconds} if is_full else {})


def _print(rows: list[dict[str, Any]], run: str) -> None:
    from rich.console import Console
    from rich.filesize import decimal
    from rich.table import Table

    table = Table(title=f"Checkpoints of {run}", title_justify="left")
    for name in ("step", "state", "size", "epoch", "ranks", "attempt", "reason", "saved"):
        table.add_column(name, justify="right" if name in ("step", "size", "epoch", "ranks", "attempt") else "left")
    for row in rows:
        state = f"[red]{_plain(row['damage'])}" if row["damage"] else "verified" if "verify_seconds" in row else "ok"
        if "created" not in row:
            table.add_row(str(row["step"]), state)
            continue
        saved = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(row["created"]))
        numbers = (str(row[name]) for name in ("epoch", "world_size", "attempt"))
        reason = f"{row['reason']} ({row['finished']})" if row["finished"] else row["reason"]
        table.add_row(str(row["step"]), state, decimal(row["bytes"]), *numbers, _plain(reason), saved)
    console = Console()
    console.print(table if rows else f"{run} has no published checkpoint.")


def _plain(text: str) -> str:
    from rich.markup import escape

    return escape(text)


if __name__ == "__main__":
    sys.exit(main())
