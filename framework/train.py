"""python -m framework.train: composes the config, checks it, builds, fits.

Guarantee: bad input ends with one readable message and exit code 1, before anything is created on disk and without a
traceback; any other failure ends with its traceback and exit code 1. A signal before the first step ends with one line
and the exit code that it has later too. Ranks other than 0 speak only to warn, with their rank in the line. Help needs
neither torch nor Hydra.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from framework import ending, launcher
from framework.errors import (
    EXIT_DONE,
    EXIT_ERROR,
    EXIT_REQUEUE,
    EXIT_SIGINT,
    EXIT_SIGTERM,
    ConfigError,
    FrameworkError,
    suggest,
)

if TYPE_CHECKING:
    from framework.trainer import Trainer

_HELP = """\
Trains a recipe. The same command continues the same run.

usage: python -m framework.train +recipe=NAME [key=value ...] [--validate | --explain | --cfg]
       python -m framework.train -m +recipe=NAME key=value,value ...

recipes found (configs/recipe/NAME.yaml):
{recipes}

options:
  -h, --help       this text
  --validate       build everything, create nothing; say what is wrong or not exact
  --explain        print what will run, in what order, and whether a resume would be exact
  --cfg            print the resolved config
  -m, --multirun   one job for each combination of the values given with commas, each a run of its own

words:
  key=value        change a key           +key=value   add one, here also a callback
  ~key             remove one             'key="a,b"'  text that holds = , ( ) [ ] {{ }} is quoted twice

common keys:
  run.name                    the identity of the run; default the recipe's name; its folder is run.root/run.name
  trainer.max_steps           how long; or trainer.max_epochs, trainer.max_time (8h)
  trainer.global_batch_size   samples per optimizer step over all ranks
  trainer.micro_batch_size    samples per forward pass and rank
  trainer.precision           fp32, bf16 or fp16
  optimizer.lr                the learning rate
  loader.num_workers          loader processes per rank
  callbacks.async_checkpoint.every   how often to save: 500, 10min
  seed                        seed of everything random

examples:
  python -m framework.train +recipe=toy
  python -m framework.train +recipe=toy optimizer.lr=0.05 run.name=slower
  python -m framework.train -m +recipe=toy optimizer.lr=0.1,0.2 seed=1,2
  python -m framework.train +recipe=toy ~callbacks.mlflow '+callbacks.mine={{_target_: my_module.MyCallback}}'
  torchrun --nproc-per-node 8 -m framework.train +recipe=imagenet_resnet data.root=/path/to/imagenet"""

_FLAGS = {
    "-h": "help", "--help": "help", "--validate": "validate", "--explain": "explain", "--cfg": "cfg",
    "-m": "multirun", "--multirun": "multirun",
}  # fmt: skip

_EXIT_CODES = {signal.SIGINT: EXIT_SIGINT, signal.SIGTERM: EXIT_SIGTERM, signal.SIGUSR1: EXIT_REQUEUE}
# A handler is put only where nobody has chosen another one. A shell lets what it starts in the background ignore SIGINT.
_USUAL: dict[signal.Signals, tuple[Any, ...]] = {
    signal.SIGINT: (signal.default_int_handler, signal.SIG_IGN),
    signal.SIGTERM: (signal.SIG_DFL,),
    signal.SIGUSR1: (signal.SIG_DFL,),
}
_before: dict[int, Any] = {}
_interrupted: list[int] = []


class Interrupted(KeyboardInterrupt):
    """A signal, raised where it arrived."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.exit_code = _EXIT_CODES[signal.Signals(number)]
        self.when = " before the first step"


@dataclass(frozen=True, slots=True)
class _Command:
    words: tuple[str, ...]
    flags: frozenset[str]


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command.

    Args:
        argv: Words after the program's name; default those of this process, which then ends with the exit code.

    Returns:
        The exit code: 0 done, 1 error, 75 requeue, 130 or 143 stopped by a signal.
    """
    return ending.exits_with(_main(sys.argv[1:])) if argv is None else _main(argv)


def _main(argv: Sequence[str]) -> int:
    try:
        _heed_signals()
        command = _parse(argv)
        if "help" in command.flags:
            _print(_help())
            return EXIT_DONE
        _configure_logging()
        if "FRAMEWORK_SWEEP_PARENT" in os.environ:
            from framework.sweep import follow_parent

            follow_parent()
        return _run(command)
    except Interrupted as error:
        _say(f"interrupted by {error}{error.when}")
        return error.exit_code
    except KeyboardInterrupt:
        _say("interrupted")
        return EXIT_SIGINT
    except SystemExit as error:  # of a user's code: whatever its code says, the run is not finished
        traceback.print_exc()
        _say(f"error: the run was left by sys.exit({error.code!r}); it is not finished.")
        return EXIT_ERROR
    except Exception as error:
        return _failed(error)
    finally:
        _unheed(*_USUAL)


def _failed(error: Exception) -> int:
    """Says what went wrong; returns the exit code."""
    behind: BaseException | None = error
    while behind is not None and not isinstance(behind, Interrupted):
        behind = behind.__cause__ or behind.__context__
    if behind is not None:  # a library's way out was not ready for a signal, and another error took its place
        _say(f"interrupted by {behind}{behind.when}")
        return behind.exit_code
    if isinstance(error, FrameworkError):
        _say(_block(error))
        return error.exit_code
    traceback.print_exc()
    return EXIT_ERROR


def _run(command: _Command) -> int:
    if "multirun" in command.flags:
        from framework import sweep

        try:
            return sweep.run(command.words)
        except Interrupted as error:
            error.when = " between two jobs"
            raise
    from framework.config import compose

    config = compose(command.words)
    if "cfg" in command.flags:
        if _rank() == 0:
            from omegaconf import OmegaConf

            _print(OmegaConf.to_yaml(OmegaConf.create(config.values)), end="")
        return EXIT_DONE
    if _rank() == 0:
        for note in config.notes:
            logging.getLogger("framework.config").warning(note)
    from framework.callbacks import promises
    from framework.config import build_callbacks, build_recipe, check, resolved
    from framework.trainer import Trainer

    settings = check(config)
    launcher.refuse_orphan("reading its config")
    callbacks = build_callbacks(config)
    trainer = Trainer(
        build_recipe(config),
        callbacks,
        trainer=settings.trainer,
        loader=settings.loader,
        run=settings.run,
        parallel=settings.parallel,
        seed=settings.seed,
        config=resolved(config),
        recipe_name=config.recipe_name,
    )
    lost = promises.broken(callbacks)
    if not command.flags & {"explain", "validate"}:
        if _rank() == 0:
            for line in lost:
                logging.getLogger("framework.callbacks").warning(line)
        return _fit(trainer)
    text = trainer.explain(lost) if "explain" in command.flags else "\n".join([*trainer.validate(), *lost, "valid"])
    if _rank() == 0:
        _print(text)
    return EXIT_DONE


def _fit(trainer: Trainer) -> int:
    from framework.callbacks import PreemptionCallback

    if _interrupted:
        raise Interrupted(_interrupted[0])
    if not any(isinstance(callback, PreemptionCallback) for callback in trainer.callbacks.values()):
        _unheed(signal.SIGTERM, signal.SIGUSR1)  # as its promise says, they then end the run at once
    try:
        return trainer.fit()
    except Interrupted as error:
        if trainer.progress.step:
            error.when = ""
        raise


def _parse(argv: Sequence[str]) -> _Command:
    """Splits options from overrides.

    Raises:
        ConfigError: There is no such option, or two that exclude each other.
    """
    flags: set[str] = set()
    words: list[str] = []
    for word in argv:
        if word in _FLAGS:
            flags.add(_FLAGS[word])
        elif word.startswith("-"):
            raise ConfigError(
                f"There is no option {word}.{suggest(word, _FLAGS)} '--name' belongs to the command, 'key=value' to the config; see --help."
            )
        else:
            words.append(word)
    if len(flags) > 1 and "help" not in flags:
        names = ", ".join(sorted(f"--{flag}" for flag in flags))
        raise ConfigError(f"{names} exclude each other. Give one of them.")
    return _Command(tuple(words), frozenset(flags))


def _help() -> str:
    from framework.config.places import recipes_listed

    return _HELP.format(recipes=recipes_listed(Path.cwd()))


def _heed_signals() -> None:
    """Remembers signals and raises: what is raised during an import may be swallowed by a bare `except` somewhere."""
    _interrupted.clear()
    if threading.current_thread() is not threading.main_thread():  # only the main thread may handle signals
        return
    for number, usual in _USUAL.items():
        if signal.getsignal(number) in usual:
            _before[number] = signal.signal(number, _interrupt)


def _unheed(*numbers: signal.Signals) -> None:
    for number in numbers:
        if signal.getsignal(number) is _interrupt:
            signal.signal(number, _before[number])


def _interrupt(number: int, frame: FrameType | None) -> None:
    _interrupted.append(number)
    raise Interrupted(number)


def _print(text: str, end: str = "\n") -> None:
    """Prints to stdout; whoever reads it may have read enough (`| head -1`)."""
    try:
        print(text, end=end, flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes once more when it exits


def _rank() -> int:
    return int(os.environ.get("RANK", "0"))


def _configure_logging() -> None:
    """The framework and the recipes speak on rank 0; all others only warn."""
    rank = _rank()
    if rank == 0:
        logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s", datefmt="%H:%M:%S")
        for name in ("framework", "recipes"):
            logging.getLogger(name).setLevel(logging.INFO)
        return
    logging.basicConfig(format=f"[rank {rank}] %(levelname)s %(name)s: %(message)s", level=logging.WARNING)
    logging.captureWarnings(True)


def _block(error: FrameworkError) -> str:
    lines = [f"error: {error}", *(f"  {note}" for note in getattr(error, "__notes__", []))]
    return "\n".join(lines)


def _say(text: str) -> None:
    """Rank 0 says it all; what other ranks say is most likely the same, so one line each will do."""
    rank = _rank()
    print(f"[rank {rank}] {text.splitlines()[0]}" if rank else text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
