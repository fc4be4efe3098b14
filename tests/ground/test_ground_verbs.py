"""Commands end with one line and the right exit code, whatever happens in them."""

from __future__ import annotations

import argparse
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from framework.errors import ConfigError
from framework.verbs import Group, run_verb


def verb(run: Any) -> Any:
    def add(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--number", type=int, default=7)

    return SimpleNamespace(HELP="what it does, in a line", MORE="examples:\n  x do", add=add, run=run)


def fails(_: object) -> int:
    raise ConfigError("x=3 is wrong. Use 4.")


def interrupted(_: object) -> int:
    raise KeyboardInterrupt


COMMANDS = {
    "do": verb(lambda arguments: int(arguments.number)),
    "fail": verb(fails),
    "stop": verb(interrupted),
    "more": Group("verbs below", "examples:\n  x more do", {"do": verb(lambda arguments: 10 * int(arguments.number))}),
}


def call(*words: str) -> int:
    return run_verb("python -m x", "What all is for.", COMMANDS, words)


def test_a_verb_gets_its_arguments_and_gives_the_exit_code(capsys: pytest.CaptureFixture[str]) -> None:
    assert (call("do"), call("do", "--number", "3"), call("more", "do", "--number", "2")) == (7, 3, 20)
    assert call("fail") == 1 and call("stop") == 130
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err == "error: x=3 is wrong. Use 4.\ninterrupted\n"


@pytest.mark.parametrize("words", [[], ["more"], ["none"], ["do", "--none"]])
def test_a_wrong_command_line_is_exit_code_2(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        call(*words)
    assert end.value.code == 2 and "usage: python -m x" in capsys.readouterr().err


def test_help_says_what_there_is_with_examples(capsys: pytest.CaptureFixture[str]) -> None:
    for words, text in (
        ([], "verbs below"),
        (["do"], "What it does, in a line."),
        (["more", "do"], "examples:\n  x do\n"),
    ):
        with pytest.raises(SystemExit) as end:
            call(*words, "--help")
        assert not end.value.code and text in capsys.readouterr().out


@pytest.mark.cold
def test_a_reader_that_has_seen_enough_is_no_error() -> None:
    code = (
        "import sys; from types import SimpleNamespace; from framework.verbs import run_verb\n"
        "def run(_):\n    for _ in range(100000): print('x' * 80)\n    return 3\n"
        "verb = SimpleNamespace(HELP='h', MORE='m', add=lambda parser: None, run=run)\n"
        "sys.exit(run_verb('x', 'y', {'do': verb}, ['do']))\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None and process.stderr is not None
    process.stdout.readline()
    process.stdout.close()
    errors = process.stderr.read()
    process.stderr.close()
    assert process.wait(60) == 0 and errors == b""
