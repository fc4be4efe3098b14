"""What users see of a run while it goes on: in a file, in a pipe, on a terminal, of several ranks, after a restart."""

from __future__ import annotations

import itertools
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support import events, kill_at, settle, start
from support.processes import JOBS, ROOT

from tests.cases.case_tools import part
from tests.cases.terminal import frames, on_terminal, standing

TRAIN = (sys.executable, "-m", "framework.train", "+recipe=toy", "callbacks.mlflow=null", "trainer.max_epochs=null")
STEP = re.compile(r"^step (\d+)/(\d+)  epoch \d+  loss \S+  ([\d.]+) steps/s", re.MULTILINE)


def environment(**more: str) -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(JOBS), str(ROOT)]), **more}


@pytest.mark.cold
@pytest.mark.timeout(180)
def test_pg_01_a_file_gets_plain_lines_now_and_then(tmp_path: Path) -> None:
    words = (*TRAIN, "trainer.max_steps=220", "recipe.step_seconds=0.1", "trainer.eval_every=null")
    ways = {
        "file": lambda command, out: (command, out),
        "nohup": lambda command, out: (["nohup", *command], out),
        "tee": lambda command, out: (["sh", "-c", '"$@" 2>&1 | tee "$0"', str(out), *command], None),
    }
    began = time.monotonic()
    running = {}
    for name, way in ways.items():
        out = tmp_path / f"{name}.log"
        command, file = way([*words, f"run.name={name}"], out)  # type: ignore[no-untyped-call]
        with open(file or os.devnull, "wb") as stream:
            running[name] = subprocess.Popen(
                command, cwd=tmp_path, env=environment(TERM="dumb"), stdout=stream, stderr=stream,
                stdin=subprocess.DEVNULL, start_new_session=True,
            )  # fmt: skip
    try:
        for process in running.values():
            assert process.wait(150) == 0
    finally:
        for process in running.values():
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait(10)
    minutes = (time.monotonic() - began) / 60
    for name in ways:
        text = (tmp_path / f"{name}.log").read_text()
        assert "\x1b" not in text and "\r" not in text
        told = [(int(step), int(total)) for step, total, _ in STEP.findall(text)]
        # 22 s at least, and a line every 10 s; more where the machine is slower
        assert len(told) >= 3 and {total for _, total in told} == {220}
        assert [step for step, _ in told] == sorted(step for step, _ in told) and told[-1] == (220, 220)
        assert len(told) <= 6 * minutes + 2
        assert len(text.splitlines()) < 50 * max(1, minutes)


@pytest.mark.cold
def test_pg_03_after_a_resume_the_bar_goes_on_where_it_was(tmp_path: Path) -> None:
    words = ("+recipe=toy", "callbacks.mlflow=null", "run.name=r", "trainer.eval_every=null", "trainer.max_epochs=null")
    start(*words, "trainer.max_steps=900", cwd=tmp_path).ends(0)
    more = ("trainer.max_steps=1000", "recipe.step_seconds=0.05")
    text = on_terminal([sys.executable, "-m", "framework.train", *words, *more], tmp_path, environment())
    bars = [line for line in frames(text) if re.search(r"\d+/1000 ", line)]
    done = [int(re.search(r"(\d+)/1000 ", bar)[1]) for bar in bars]  # type: ignore[index]
    assert done[0] == 900 and done == sorted(done) and done[-1] == 1000
    later = [bar for bar, step in zip(bars, done, strict=True) if 920 <= step < 980]
    assert later
    for bar in later:
        step = int(re.search(r"(\d+)/1000 ", bar)[1])  # type: ignore[index]
        hours, minutes, seconds = map(int, re.search(r"(\d+):(\d\d):(\d\d)", bar).groups())  # type: ignore[union-attr]
        left = 3600 * hours + 60 * minutes + seconds
        # a step sleeps for 50 ms; a busy machine may take longer, but not as if 900 steps had been done in an instant
        assert 0.5 * 0.05 * (1000 - step) - 1 <= left <= 60
        rate = float(re.search(r"([\d.]+) steps/s", bar)[1])  # type: ignore[index]
        assert rate <= 20.0


@pytest.mark.cold
def test_pg_05_one_display_of_several_ranks_and_warnings_with_their_rank(tmp_path: Path) -> None:
    launcher = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m")
    words = (*launcher, *TRAIN[2:], "trainer.max_steps=60", "recipe.step_seconds=0.02", part("Warns"))
    piped = subprocess.run(
        [*words, "run.name=piped"], cwd=tmp_path, env=environment(), stdin=subprocess.DEVNULL, check=True,
        capture_output=True, timeout=120, text=True,
    )  # fmt: skip
    lines = [*piped.stdout.splitlines(), *piped.stderr.splitlines()]
    assert [line for line in lines if STEP.match(line)] == [
        line for line in piped.stdout.splitlines() if STEP.match(line)
    ]
    assert sum(line.startswith("step 60/60") for line in lines) == 1
    drawn = on_terminal([*words, "run.name=drawn"], tmp_path, environment())
    assert sum("60/60" in line for line in standing(drawn)) == 1
    for seen in (lines, standing(drawn)):
        [loud] = [line for line in seen if "loud 0;" in line]
        assert "rank" not in loud
        [loud] = [line for line in seen if "loud 1;" in line]
        assert "rank 1" in loud
        assert sum("quiet 0;" in line for line in seen) == 1
        assert not any("quiet 1;" in line for line in seen)
        assert sum(line.startswith("finished at step 60") for line in seen) == 1


@pytest.mark.cold
def test_pg_07_what_the_user_says_comes_once_and_whole(tmp_path: Path) -> None:
    words = (*TRAIN, "trainer.max_steps=40", "trainer.eval_every=20", "recipe.step_seconds=0.02", part("Chatty"))
    piped = subprocess.run(
        [*words, "run.name=piped"], cwd=tmp_path, env=environment(), stdin=subprocess.DEVNULL, check=True,
        capture_output=True, timeout=120, text=True,
    )  # fmt: skip
    drawn = on_terminal([*words, "run.name=drawn"], tmp_path, environment())
    for seen in ([*piped.stdout.splitlines(), *piped.stderr.splitlines()], standing(drawn)):
        for said, step in itertools.product(("printed", "complained"), range(5, 41, 5)):
            assert seen.count(f"{said} {step};") == 1, (said, step)
        for said, step in itertools.product(("logged", "warned"), range(5, 41, 5)):
            assert sum(f"{said} {step};" in line for line in seen) == 1, (said, step)
        for step in (20, 40):
            assert any(f"mine {step};" in line for line in seen)
        assert not any("Error" in line or "Traceback" in line for line in seen)


def test_cb_10_after_a_restart_rates_and_goodput_are_those_of_the_run(tmp_path: Path) -> None:
    words = (
        "+recipe=toy", "callbacks.mlflow=null", "run.name=r", "trainer.eval_every=null", "trainer.max_epochs=null",
        "trainer.max_steps=40", "recipe.step_seconds=0.05", "callbacks.async_checkpoint.every=15", settle(),
        kill_at(20, "step_end"),
    )  # fmt: skip
    run = tmp_path / "runs" / "r"
    start(*words, cwd=tmp_path).crashed()
    time.sleep(2)
    second = start(*words, cwd=tmp_path).ends(0)
    command = [sys.executable, "-m", "framework.goodput", "report", str(run), "--json"]
    told = json.loads(subprocess.run(command, check=True, capture_output=True, timeout=120, env=environment()).stdout)
    assert 0 <= told["ratio"] <= 1 and 0 <= told["ratio_durable"] <= told["ratio"]
    assert (told["steps_done"], told["steps_lost"], told["attempts"]) == (40, 5, 2)
    kept = {}
    for event in events(run, "steps"):
        for index, seconds in enumerate(event["seconds"]["productive"]):
            kept[event["first"] + index] = seconds
    spent = told["seconds"]["productive"] + told["seconds"]["warmup"]
    assert len(kept) == 40 and 40 * 0.05 <= spent == pytest.approx(sum(kept.values()), abs=1e-3)
    # the process of the second attempt stood by, forked, in a part of the pause
    assert told["seconds"]["down"] + told["seconds"]["init"] >= 2 and told["seconds"]["lost"] >= 5 * 0.05
    rates = [float(rate) for _, _, rate in STEP.findall(second.stdout())]
    assert rates and all(0 < rate <= 20.0 for rate in rates), "a step sleeps for 50 ms"
    shown = re.findall(r"goodput (\d+)%  data wait (\d+)%", second.stdout())
    assert shown and all(0 <= int(share) <= 100 for pair in shown for share in pair)
    # the last line is of nearly the same moment as the report, and over both attempts, with the pause in it
    assert abs(int(shown[-1][0]) - 100 * told["ratio"]) <= 5
