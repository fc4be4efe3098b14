"""Commands of the form `python -m framework.x VERB`.

Guarantee: `--help` loads nothing that only a verb needs. Errors are one line on stderr; a pipe that closes early and
Ctrl-C end a command without a traceback. Exit codes: 0 done, 1 an error, 2 a wrong command line, 130 after Ctrl-C, and
what a verb's help says.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from framework.errors import EXIT_DONE, EXIT_SIGINT, FrameworkError

if TYPE_CHECKING:
    _Verbs = argparse._SubParsersAction[argparse.ArgumentParser]

VERB = "the verb"  # under which the parsed arguments have what to run: no name that an option can have


class Command(Protocol):
    """What a module must have to be a verb."""

    HELP: str  # one line, without a full stop
    MORE: str  # shown below the options: examples and exit codes

    def add(self, parser: argparse.ArgumentParser, /) -> None:
        """Adds the arguments."""

    def run(self, arguments: argparse.Namespace, /) -> int:
        """Does it; returns the exit code."""


@dataclass(frozen=True, slots=True)
class Group:
    """A verb that has verbs of its own.

    Args:
        help: One line, without a full stop.
        more: Shown below its verbs.
        commands: The verbs.
    """

    help: str
    more: str
    commands: Mapping[str, Command]


def run_verb(
    prog: str, description: str, commands: Mapping[str, Command | Group], argv: Sequence[str] | None = None
) -> int:
    """Runs one command.

    Args:
        prog: How it is called, as in `python -m framework.x`.
        description: What all of it is for.
        commands: The verbs: modules like `Command`, or groups of them.
        argv: Arguments, default those of the process.

    Returns:
        The exit code.
    """
    parser = argparse.ArgumentParser(prog=prog, description=f"{description} VERB --help tells more.")
    _add_verbs(parser, commands)
    arguments = parser.parse_args(argv)
    run: Callable[[argparse.Namespace], int] = getattr(arguments, VERB)
    try:
        code = run(arguments)
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


def _add_verbs(parser: argparse.ArgumentParser, commands: Mapping[str, Command | Group]) -> None:
    verbs = parser.add_subparsers(required=True, metavar="VERB")
    for name, command in commands.items():
        if isinstance(command, Group):
            _add_verbs(_verb(verbs, name, command.help, command.more), command.commands)
        else:
            verb = _verb(verbs, name, command.HELP, command.MORE)
            verb.set_defaults(**{VERB: command.run})
            command.add(verb)


def _verb(verbs: _Verbs, name: str, text: str, more: str) -> argparse.ArgumentParser:
    description = f"{text[:1].upper()}{text[1:]}."
    kind = argparse.RawDescriptionHelpFormatter
    return verbs.add_parser(name, help=text, description=description, epilog=more, formatter_class=kind)


def _drop_output() -> None:
    """What is still buffered goes nowhere, so that the end of the interpreter does not stumble over it."""
    with contextlib.suppress(OSError, ValueError):
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, sys.stdout.fileno())
        os.close(null)
