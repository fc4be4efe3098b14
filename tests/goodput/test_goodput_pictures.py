"""The pictures of the report: in a real browser, as a file, and as numbers."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from goodput_story import Story
from support.browser import Browser

from framework.goodput.__main__ import main
from framework.goodput.reporting import html, series
from framework.goodput.reporting.report import Report, build

EVIL = "</script><img src=x onerror=alert(1)><b>&amp;$\\frac"
NAME = EVIL.replace("/", "∕")  # no file name has a slash


def written(story: Story, path: Path) -> Path:
    """A run directory that holds what the story tells."""
    for attempt in range(1, story.attempt + 1):
        folder = path / f"events/att-{attempt:04d}"
        folder.mkdir(parents=True)
        lines = [json.dumps(event) for event in story.events if event["att"] == attempt]
        (folder / "rank0.jsonl").write_text("\n".join(lines) + "\n")
    return path


def stormy() -> Story:
    """A failure, a kill and a stop, saves of different costs, steps of different lengths."""
    story = Story().start(init=8).train(30, productive=[1 + step / 60 for step in range(30)], data_wait=0.5)
    story.commit(0.1, 3).train(5, productive=1.0)
    story.event("failure", type="RuntimeError", message=EVIL, step=35).end("failed", 1)
    story.wait(60).start(init=4, restored=30, restore_seconds=1).train(10, productive=1.0, data_wait=0.2).commit(0.2, 2)
    story.event("save_failed", step=40, error="disk full").train(7, productive=1.0)
    story.wait(20).start(init=4, restored=40, restore_seconds=1).train(20, productive=2.0).commit(0.4, 1)
    return story.event("end", status="killed", exit_code=143, step=60, reason="received SIGTERM")


def busy() -> Story:
    """5,000 steps of uneven length: more than a picture has points."""
    story = Story().start(init=8)
    for _ in range(50):
        productive = [0.1 + 0.05 * (step % 3 == 0) for step in range(100)]
        story.train(100, productive=productive, data_wait=0.02).commit(0.1, 3)
    return story.event("failure", type="RuntimeError", message=EVIL, step=5000).end("failed", 1)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run whose name is meant to break out of the page."""
    return written(stormy(), tmp_path / NAME)


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with Browser(tmp_path_factory.mktemp("profile")) as opened:
        yield opened


@pytest.mark.parametrize("story", [stormy, busy])
def test_in_a_browser_the_pictures_show_the_numbers_of_the_json_and_nothing_is_loaded(
    story: Callable[[], Story], browser: Browser, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, page = written(story(), tmp_path / NAME), tmp_path / "page.html"
    assert main(["report", str(run), "--json", "--html", str(page)]) == 0
    values = json.loads(capsys.readouterr().out)
    for width, is_dark in ((1280, False), (390, True)):
        browser.requests.clear()
        browser.open(page, width, is_dark)
        assert browser.value("document.documentElement.dataset.ready") == "true"
        assert browser.value("document.documentElement.scrollWidth") == width, "nothing sticks out"
        assert browser.requests == [page.as_uri()]
        assert browser.complaints == []
        assert_bars(browser, values)
        assert_timeline(browser, values)
        for picture in ("steps", "stall", "persist", "age"):
            assert_lines(browser, picture, values["pictures"])
        assert browser.value("document.querySelectorAll('[data-incident]').length") == len(values["incidents"])
        assert browser.value("document.querySelectorAll('img, main b b').length") == 0
        assert EVIL in browser.value("document.body.textContent")


def assert_bars(browser: Browser, values: dict[str, Any]) -> None:
    bars = browser.value(
        "[...document.querySelectorAll('.bars i')].map(i => [i.dataset.category, +i.dataset.seconds, i.getBoundingClientRect().width])"
    )
    assert {name: seconds for name, seconds, _ in bars} == {n: s for n, s in values["seconds"].items() if s > 0}
    longest = max(bars, key=lambda bar: bar[1])
    for _, seconds, width in bars:
        assert width == pytest.approx(max(1.0, longest[2] * seconds / longest[1]), abs=0.5)


def assert_timeline(browser: Browser, values: dict[str, Any]) -> None:
    """The area of each colour is its seconds."""
    script = "[...document.querySelectorAll('[data-picture=timeline] [data-category]')].map(p => [p.dataset.category, p.getAttribute('d')])"
    width = browser.value("document.querySelector('[data-picture=timeline]').clientWidth")
    shown = dict(browser.value(script))
    assert {name for name, seconds in values["seconds"].items() if seconds > 1e-3} <= set(shown)
    for name, path in shown.items():
        pieces = re.findall(r"M(\S+) \S+H(\S+)v([\d.]+)H\S+z", path)
        area = sum((float(right) - float(left)) * float(tall) for left, right, tall in pieces)
        seconds = area / 62 / width * values["wall"]
        assert seconds == pytest.approx(values["seconds"][name], abs=0.02 * len(pieces) / width * values["wall"] + 0.05)


def assert_lines(browser: Browser, picture: str, pictures: dict[str, Any]) -> None:
    """Each point of each line, read back through its axes, is the median of the JSON."""
    at = f"document.querySelector('[data-picture={picture}] svg')"
    facts = browser.value(f"({{...{at}.dataset, height: {at}.getAttribute('height')}})")
    lines = browser.value(
        f"[...{at}.querySelectorAll('[data-series]')].map(p => [p.dataset.series, p.getAttribute('d')])"
    )
    columns = pictures["steps" if picture == "steps" else "checkpoints"]
    assert [name for name, _ in lines] == (["step", "fetch"] if picture == "steps" else [picture])
    number = {key: float(value) for key, value in facts.items() if key != "log"}
    wide = number["width"] - number["left"] - number["right"]
    tall = number["height"] - number["top"] - number["bottom"]
    for name, path in lines:
        points = [(float(x), float(y)) for x, y in re.findall(r"[ML](\S+?) ([\d.]+)", path)]
        wanted = [
            ((first + last) / 2, value)
            for first, last, value in zip(columns["first"], columns["last"], columns[name]["median"], strict=True)
            if value is not None
        ]
        assert len(points) == len(wanted) > 0
        for (x, y), (step, value) in zip(points, wanted, strict=True):
            share = (number["height"] - number["bottom"] - y) / tall
            read = (
                number["low"] * (number["high"] / number["low"]) ** share
                if facts["log"] == "true"
                else share * number["high"]
            )
            assert number["first"] + (x - number["left"]) / wide * (number["last"] - number["first"]) == pytest.approx(
                step, abs=0.01
            )
            assert read == pytest.approx(value, rel=1e-3, abs=1e-3 * number["high"])


def test_the_timeline_can_be_zoomed(run: Path, browser: Browser, tmp_path: Path) -> None:
    html.write(run, tmp_path / "page.html")
    browser.open(tmp_path / "page.html")
    shown = "(d => d.high - d.low)(document.querySelector('[data-picture=timeline] svg').dataset)"
    whole = browser.value(shown)
    browser.value("document.querySelector('[data-do=in]').click()")
    assert browser.value(shown) == pytest.approx(whole / 2)
    place = browser.value(
        "(r => [r.left, r.top, r.width])(document.querySelector('[data-picture=timeline] svg').getBoundingClientRect())"
    )
    for kind, share in (("mousePressed", 0.25), ("mouseMoved", 0.5), ("mouseReleased", 0.5)):
        x, y = place[0] + share * place[2], place[1] + 40
        browser.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", buttons=1, clickCount=1)
    assert browser.value(shown) == pytest.approx(whole / 8, rel=0.01)
    browser.value("document.querySelector('[data-do=all]').click()")
    assert browser.value(shown) == pytest.approx(whole)
    assert browser.complaints == []


def test_incidents_have_cause_step_and_cost_and_sum_to_the_account(run: Path) -> None:
    report = build(run)
    found = [(one.kind, one.step, one.resumed, one.lost_steps) for one in report.incidents]
    assert found == [
        ("failed", 35, 30, 5), ("save failed", 40, None, 0), ("killed", 47, 40, 7), ("stopped", 60, None, 0),
    ]  # fmt: skip
    assert sum(one.lost_steps for one in report.incidents) == report.goodput.steps_lost
    assert report.incidents[0].cause == f"RuntimeError: {EVIL}"
    assert report.incidents[0].down_seconds == pytest.approx(60, abs=0.1)
    assert report.incidents[3].cause == "received SIGTERM"
    saves = report.pictures["checkpoints"]
    assert saves["stall"]["median"] == [0.1, 0.2, 0.4]
    assert saves["age"]["median"][0] is None


def long() -> Story:
    """54 days in 120,000 steps, a failure every 2,000."""
    story = Story()
    for attempt in range(60):
        story.start(init=600, restored=story.step if attempt else None, restore_seconds=60)
        for _ in range(20):
            story.train(100, productive=[30 + step % 7 for step in range(100)], data_wait=0.5)
            if _ % 2:
                story.commit(2.0, 60.0)
        story.event("failure", type="E", message="x" * 500, step=story.step).end("failed", 1).wait(300)
    return story


def test_a_run_of_54_days_stays_small_and_keeps_its_sums(tmp_path: Path) -> None:
    report = build(written(long(), tmp_path / "long"))
    cells = report.pictures["timeline"]
    assert len(cells) <= 2 * series.MAX_POINTS
    for name, seconds in report.goodput.seconds.items():
        assert sum(cell["seconds"].get(name, 0.0) for cell in cells) == pytest.approx(seconds, abs=0.01)
    assert [cell["end"] for cell in cells[:-1]] == [cell["start"] for cell in cells[1:]]
    steps = report.pictures["steps"]
    assert 1000 <= len(steps["first"]) <= series.MAX_POINTS
    assert (steps["first"][0], steps["last"][-1]) == (1, 120_000)
    assert (min(steps["step"]["min"]), max(steps["step"]["max"])) == (30.5, 36.5)
    assert len(html.page([report])) < 1_000_000


def test_several_runs_are_one_table_and_one_page(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    calm = written(Story().start(init=1).train(10, productive=1.0).end(), tmp_path / "calm")
    page = tmp_path / "both.html"
    assert main(["report", str(calm), str(run), "--html", str(page)]) == 0
    shown = capsys.readouterr().out
    assert re.search(r"steps done twice +0 +12 *\n", shown)
    assert re.search(r"attempts +1 +3 *\n", shown)
    assert page.read_text().count('data-picture="timeline"') == 2


@pytest.mark.parametrize("is_asked", [False, True])
def test_a_page_that_cannot_be_written_is_one_line(
    is_asked: bool, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (run / "report.html").mkdir()
    asked = ["--html", str(run / "report.html")] if is_asked else []
    assert main(["report", str(run), *asked]) == (1 if is_asked else 0)
    shown = capsys.readouterr()
    assert "goodput" in shown.out
    assert shown.err.count("\n") == 1
    assert "report.html cannot be written" in shown.err
    assert not list(run.glob(".report*"))


def test_json_writes_no_page_unasked_and_no_html_none(run: Path) -> None:
    assert main(["report", str(run), "--json"]) == 0
    assert main(["report", str(run), "--no-html"]) == 0
    assert not (run / "report.html").exists()
    assert main(["report", str(run)]) == 0
    assert (run / "report.html").stat().st_size < 200_000


def test_a_picture_for_papers(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from PIL import Image

    calm = written(Story().start(init=1).end(), tmp_path / "no_step")
    assert main(["report", str(run), str(calm), "--no-html", "--png", str(tmp_path / "a.png")]) == 0
    with Image.open(tmp_path / "a.png") as image:
        assert image.width > 1500
        colors = {color for _, color in image.convert("RGB").getcolors(1 << 20) or ()}
    assert (0x00, 0x9E, 0x73) in colors, "productive"
    assert main(["report", str(run), "--no-html", "--png", str(tmp_path / "none/a.png")]) == 1
    assert "cannot be written" in capsys.readouterr().err


def test_advice_names_keys_values_and_figures(run: Path) -> None:
    (run / "config.yaml").write_text(
        "loader: {num_workers: 4, prefetch_factor: 2}\ncallbacks: {async_checkpoint: {every: 10min}}\n"
    )
    advice = dict(build(run).losses)
    assert "the longest of 2 waits took 1 min 00 s" in advice["down"]
    told = " ".join(_all_advice(build(run)).values())
    for words in (
        "loader.num_workers=8 (now 4)", "callbacks.async_checkpoint.every=auto, which would save every", "(now 10min)",
        "12 in 2 restarts",
    ):  # fmt: skip
        assert words in told


def _all_advice(report: Report) -> dict[str, str]:
    from framework.goodput.reporting import advice
    from framework.journal import read_run
    from framework.rundir import RunDirectory

    run = RunDirectory(report.path)
    known = advice.facts(run, read_run(run.events), report.goodput, report.incidents, None)
    return {name: advice.advice(name, known) for name in report.goodput.seconds if name != "productive"}
