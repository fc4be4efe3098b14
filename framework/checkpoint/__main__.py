"""python -m framework.checkpoint VERB: looks at the checkpoints of runs, and takes them elsewhere.

Guarantee: `--help` needs neither torch nor numpy. Errors are one line on stderr that names the path; a pipe that closes
early and Ctrl-C end a command without a traceback. Exit codes: 0 done, 1 damaged, different or an error, 2 a wrong
command line, 130 after Ctrl-C; those of `diff` are in its help.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Sequence
from types import ModuleType

from framework.checkpoint.commands import copy, diff, export, gc, ls, pin, show, unpin, verify
from framework.errors import EXIT_DONE, EXIT_SIGINT, FrameworkError

PROGRAM = "python -m framework.checkpoint"
COMMANDS: dict[str, ModuleType] = {
    "ls": ls, "show": show, "verify": verify, "diff": diff, "copy": copy, "export": export, "gc": gc, "pin": pin,
    "unpin": unpin,
}  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command.

    Args:
        argv: Arguments, default those of the process.

    Returns:
        The exit code.
    """
    parser = command_line()
    arguments = parser.parse_args(argv)
    if empty := [name for name, value in vars(arguments).items() if value == ""]:  # as a path: the current folder
        parser.error(
            f"{arguments.command}: an argument is empty ({', '.join(empty)}). Is a variable of the shell unset?"
        )
    try:
        code: int = COMMANDS[arguments.command].run(arguments)
        sys.stdout.flush()
        return code
    except FrameworkError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except BrokenPipeError:  # the reader of a pipe has seen enough
        _drop_output()
        return EXIT_DONE
    except KeyboardInterrupt:
        with contextlib.suppress(OSError):
            print("interrupted", file=sys.stderr)
        return EXIT_SIGINT


def _drop_output() -> None:
    """What is still buffered goes nowhere, so that the end of the interpreter does not stumble over it."""
    with contextlib.suppress(OSError, ValueError):
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, sys.stdout.fileno())
        os.close(null)


def command_line() -> argparse.ArgumentParser:
    """What the command line may say."""
    parser = argparse.ArgumentParser(
        prog=PROGRAM,
        description="Looks at the checkpoints of runs, and takes them elsewhere. VERB --help tells more.",
    )
    verbs = parser.add_subparsers(dest="command", required=True, metavar="VERB")
    for name, command in COMMANDS.items():
        text = f"{command.HELP[:1].upper()}{command.HELP[1:]}."
        verb = verbs.add_parser(
            name,
            help=command.HELP,
            description=text,
            epilog="\n".join([command.MORE, "", "examples:", *(f"  {PROGRAM} {words}" for words in command.EXAMPLES)]),
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        command.add(verb)
    return parser


if __name__ == "__main__":
    sys.exit(main())
