"""python -m framework.goodput VERB: where the time of runs went.

Guarantee: `--help` answers at once and needs neither torch nor numpy; for the rest see `framework.verbs`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from framework.goodput.commands import export, interval, plan, report, simulate, tail
from framework.verbs import Command, Group, run_verb

COMMANDS: dict[str, Command | Group] = {
    "report": report,
    "tail": tail,
    "interval": interval,
    "plan": plan,
    "simulate": simulate,
    "export": export,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command.

    Args:
        argv: Arguments, default those of the process.

    Returns:
        The exit code.
    """
    return run_verb("python -m framework.goodput", "Where the time of runs went.", COMMANDS, argv)


if __name__ == "__main__":
    sys.exit(main())
