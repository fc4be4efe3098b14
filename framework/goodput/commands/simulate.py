"""`simulate`: plays a job that fails, event by event.

Guarantee: the same options and seed give the same figures; nothing is written.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from framework.errors import EXIT_DONE, ConfigError
from framework.goodput.planning import options

if TYPE_CHECKING:
    from framework.goodput.planning.plan import Plan
    from framework.goodput.planning.simulation import Outcome, Scenario

HELP = "play a job that fails, event by event: confirms the formulas, and tells what they cannot"
MORE = """examples:
  python -m framework.goodput simulate --gpus 16384 --rate llama3
  python -m framework.goodput simulate --gpus 16384 --slow-share 0.1 --slow-factor 10
  python -m framework.goodput simulate --gpus 16384 --repair 1d --spares 8
  python -m framework.goodput simulate --gpus 16384 --repair 1d --elastic
  python -m framework.goodput simulate --gpus 16384 --fast-every 60s --fast-stall 0.5 --fast-share 0.8
  python -m framework.goodput simulate --gpus 1024 --wave-every 2d --wave-length 3h

Times are seconds, or 90s, 10min, 2h, 1d. Exit code: 0; 1 if an option makes no sense."""
PARTS = ("productive", "lost", "smaller", "stall", "restart", "wait")


def add(parser: argparse.ArgumentParser) -> None:
    options.add(parser)
    parser.add_argument("--runs", default="5", help="how many jobs are played, default 5")
    parser.add_argument("--seed", type=int, default=0, help="of the random numbers, default 0")
    parser.add_argument("--slow-share", default="0", help="share of the saves that are slow to be durable, default 0")
    parser.add_argument("--slow-factor", default="5", help="how many times as slow, default 5")
    parser.add_argument("--wave-every", help="mean time between announced preemptions of the whole job")
    parser.add_argument("--wave-length", default="1h", help="how long each lasts, default 1h")
    parser.add_argument(
        "--repair", default="0", help="time to repair a failed node; default 0: a restart finds it whole"
    )
    parser.add_argument("--node-gpus", default="8", help="GPUs of a node, default 8")
    parser.add_argument("--spares", default="0", help="nodes that stand by, default 0")
    parser.add_argument("--elastic", action="store_true", help="go on with fewer nodes instead of waiting for a repair")
    parser.add_argument("--fast-every", help="time between saves into the memory of other hosts")
    parser.add_argument("--fast-stall", default="0", help="how long each holds the steps up, default 0")
    parser.add_argument("--fast-share", default="0.8", help="share of the failures that they survive, default 0.8")
    parser.add_argument("--json", action="store_true", help="machine-readable")


def run(arguments: argparse.Namespace) -> int:
    from framework.goodput.planning.formulas import goodput
    from framework.goodput.planning.simulation import runs, spread
    from framework.goodput.reporting.words import duration
    from framework.speaking import print_json, print_table, say

    plan = options.plan_of(arguments)
    scenario = _scenario(plan, arguments)
    count = int(options.number("--runs", arguments.runs))
    outcomes = runs(scenario, max(1, count), arguments.seed)
    mean, error = spread(outcomes)
    formula = goodput(scenario.interval, scenario.stall, scenario.mtbf, scenario.restart, scenario.persist)
    shares = _shares(outcomes)
    if arguments.json:
        facts = {"goodput": mean, "standard_error": error, "formula": formula, "shares": shares}
        print_json(facts | {"interval_seconds": scenario.interval, "runs": [_values(one) for one in outcomes]})
        return EXIT_DONE
    source = f" ({plan.rate.source})" if plan.rate.source else ""
    say(f"{plan.gpus:,} GPUs for {plan.days:g} days, {len(outcomes)} times; failure rate {plan.rate.text}{source}")
    best = "" if arguments.interval else ", the best one by the formula"
    say(f"saving every {duration(scenario.interval)}{best}")
    print_table("", ["part of the time", ">share"], [[name, f"{share:.2%}"] for name, share in shares.items()])
    failures = sum(one.failures for one in outcomes) / len(outcomes)
    say(f"goodput {mean:.2%} ± {error:.2%} (standard error), {failures:,.1f} failures a job")
    say(f"closed form, without slow saves, waves, repairs and fast saves: {formula:.2%}")
    return EXIT_DONE


def _scenario(plan: Plan, arguments: argparse.Namespace) -> Scenario:
    from framework.goodput.planning.simulation import DAY, Scenario

    number, seconds = options.number, options.seconds
    wave = None if arguments.wave_every is None else seconds("--wave-every", arguments.wave_every, above_zero=True)
    fast = None if arguments.fast_every is None else seconds("--fast-every", arguments.fast_every, above_zero=True)
    return Scenario(
        gpus=plan.gpus,
        gpu_hours=plan.rate.gpu_hours,
        interval=plan.best.interval if plan.interval is None else plan.interval,
        stall=plan.costs.stall,
        persist=plan.costs.persist,
        restart=plan.costs.restart,
        length=plan.days * DAY,
        slow_share=_share("--slow-share", arguments.slow_share),
        slow_factor=number("--slow-factor", arguments.slow_factor),
        wave_every=wave,
        wave_length=seconds("--wave-length", arguments.wave_length),
        node_gpus=int(number("--node-gpus", arguments.node_gpus)),
        repair=seconds("--repair", arguments.repair),
        spares=int(number("--spares", arguments.spares, above_zero=False)),
        is_elastic=arguments.elastic,
        fast_every=fast,
        fast_stall=seconds("--fast-stall", arguments.fast_stall),
        fast_share=_share("--fast-share", arguments.fast_share),
    )


def _share(option: str, text: str) -> float:
    value = options.number(option, text, above_zero=False)
    if value > 1:
        raise ConfigError(f"{option}={text} is a share: from 0 to 1.")
    return value


def _shares(outcomes: list[Outcome]) -> dict[str, float]:
    wall = sum(one.wall for one in outcomes)
    return {name: sum(getattr(one, name) for one in outcomes) / wall for name in PARTS}


def _values(one: Outcome) -> dict[str, Any]:
    return {name: getattr(one, name) for name in (*PARTS, "wall", "failures", "skipped", "goodput")}
