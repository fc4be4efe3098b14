"""`export`: copies the metrics of a run to a tracking server or a file.

Guarantee: the run directory stays as it is, but for the note of what the server has.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from framework.errors import EXIT_DONE, ConfigError

HELP = "copy to MLflow what is not there yet; metrics as CSV, for TensorBoard"
MORE = """examples:
  python -m framework.goodput export runs/toy --mlflow
  python -m framework.goodput export runs/toy --mlflow --uri http://tracking:5000
  python -m framework.goodput export runs/toy --csv toy.csv
  python -m framework.goodput export runs/toy --tensorboard boards/toy

Exit code: 0; 1 if the server did not take everything, or the run or the address is wrong."""


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", help="run directory")
    parser.add_argument("--mlflow", action="store_true", help="to MLflow")
    parser.add_argument("--csv", metavar="FILE", type=Path, help="to a table, one row a step; replaces it")
    parser.add_argument("--tensorboard", metavar="DIR", type=Path, help="to an event file; replaces those in DIR")
    parser.add_argument("--uri", help="of MLflow; default: the one in RUN/mlflow.json, else the sqlite file beside RUN")
    parser.add_argument("--experiment", help="default: the one in RUN/mlflow.json")
    parser.add_argument("--run-name", help="default: the one in RUN/mlflow.json, else the name of RUN")


def run(arguments: argparse.Namespace) -> int:
    if not (arguments.mlflow or arguments.csv or arguments.tensorboard):
        raise ConfigError("Say where to: --mlflow, --csv FILE or --tensorboard DIR.")
    if arguments.csv or arguments.tensorboard:
        _copy(arguments)
    return _to_mlflow(arguments) if arguments.mlflow else EXIT_DONE


def _copy(arguments: argparse.Namespace) -> None:
    from framework.goodput.tracking.csv_table import CsvTable
    from framework.goodput.tracking.follower import copy
    from framework.goodput.tracking.tensorboard_log import TensorBoardLog

    for make, target in ((CsvTable, arguments.csv), (TensorBoardLog, arguments.tensorboard)):
        if target is not None:
            copy(arguments.run, make, target)
            print(f"everything in {arguments.run} is in {target}")


def _to_mlflow(arguments: argparse.Namespace) -> int:
    from framework.goodput.tracking.exporter import export

    is_complete = export(arguments.run, arguments.uri, arguments.experiment, arguments.run_name)
    if is_complete:
        print(f"everything in {arguments.run} is in MLflow")
    return EXIT_DONE if is_complete else 1
