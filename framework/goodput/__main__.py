"""python -m framework.goodput {report RUN... | export RUN --mlflow}

Guarantee: exit 0 if it did what it was asked, 1 if a tracking server did not take everything, 2 if the run or the
address is wrong, with one line that says what to do. `--help` answers at once: nothing heavy is imported before it.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    from framework.errors import FrameworkError

    try:
        return _report(args) if args.command == "report" else _export(args)
    except FrameworkError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # the reader of a pipe has seen enough
        sys.stderr.close()
        return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m framework.goodput", description="Where the time of a run went.")
    commands = parser.add_subparsers(dest="command", required=True)
    report = commands.add_parser("report", help="categories of time, attempts, checkpoints, the biggest losses")
    report.add_argument("run", nargs="+", help="run directory, for example runs/toy")
    report.add_argument("--json", action="store_true", help="machine-readable; one object, or a list for several runs")
    export = commands.add_parser("export", help="copy to a tracking server what is not there yet")
    export.add_argument("run", help="run directory")
    export.add_argument("--mlflow", action="store_true", required=True, help="to MLflow")
    export.add_argument("--uri", help="default: the one in RUN/mlflow.json, else the sqlite file beside RUN")
    export.add_argument("--experiment", help="default: the one in RUN/mlflow.json")
    export.add_argument("--run-name", help="default: the one in RUN/mlflow.json, else the name of RUN")
    return parser


def _report(args: argparse.Namespace) -> int:
    from framework.goodput.report import build, show

    reports = [build(run) for run in args.run]
    if args.json:
        import json

        values = [report.to_json() for report in reports]
        print(json.dumps(values[0] if len(values) == 1 else values, indent=1, default=str))
        return 0
    for report in reports:
        show(report)
    return 0


def _export(args: argparse.Namespace) -> int:
    from framework.goodput.exporter import export

    is_complete = export(args.run, args.uri, args.experiment, args.run_name)
    if is_complete:
        print(f"everything in {args.run} is in MLflow")
    return 0 if is_complete else 1


if __name__ == "__main__":
    sys.exit(main())
