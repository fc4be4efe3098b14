"""`export`: copies to a tracking server what is not there yet.

Guarantee: the run directory stays as it is, but for the note of what the server has.
"""

from __future__ import annotations

import argparse

from framework.errors import EXIT_DONE

HELP = "copy to a tracking server what is not there yet"
MORE = """examples:
  python -m framework.goodput export runs/toy --mlflow
  python -m framework.goodput export runs/toy --mlflow --uri http://tracking:5000

Exit code: 0; 1 if the server did not take everything, or the run or the address is wrong."""


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", help="run directory")
    parser.add_argument("--mlflow", action="store_true", required=True, help="to MLflow")
    parser.add_argument("--uri", help="default: the one in RUN/mlflow.json, else the sqlite file beside RUN")
    parser.add_argument("--experiment", help="default: the one in RUN/mlflow.json")
    parser.add_argument("--run-name", help="default: the one in RUN/mlflow.json, else the name of RUN")


def run(arguments: argparse.Namespace) -> int:
    from framework.goodput.tracking.exporter import export

    is_complete = export(arguments.run, arguments.uri, arguments.experiment, arguments.run_name)
    if is_complete:
        print(f"everything in {arguments.run} is in MLflow")
    return EXIT_DONE if is_complete else 1
