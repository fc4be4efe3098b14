"""python -m framework.data VERB: looks at what concerns the data of runs.

Guarantee: `--help` needs neither torch nor numpy; for the rest see `framework.verbs`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from framework.data.commands import audit, cache_clear, cache_ls
from framework.verbs import Command, Group, run_verb

CACHE = Group(
    "the cache of volumes' files on this host",
    """examples:
  python -m framework.data cache ls
  python -m framework.data cache clear --dataset 3f2a""",
    {"ls": cache_ls, "clear": cache_clear},
)
COMMANDS: dict[str, Command | Group] = {"audit": audit, "cache": CACHE}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command.

    Args:
        argv: Arguments, default those of the process.

    Returns:
        The exit code.
    """
    return run_verb("python -m framework.data", "Looks at what concerns the data of runs.", COMMANDS, argv)


if __name__ == "__main__":
    sys.exit(main())
