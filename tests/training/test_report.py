"""The report page: safe whatever is in it, complete, and working in a real browser."""

import html
import json
import math
import re
from collections.abc import Iterator
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardnet.telemetry import Span, Track
from shardnet.training.record import RankRecord, RunRecord, StepRecord, Validation
from shardnet.training.report import MAX_STEPS, page_data, write_report
from shardnet.training.trace import RankSpans
from tests.browser import CHROMIUM, Page, browser

NASTY = '</script><script>window.hacked = true</script> <!-- <b>&amp; «DATA» \u2028 " \\ \ufffd'
MS = 1_000_000  # ns


def spans(rank: int) -> RankSpans:
    """Two steps of 100 ms: 60 ms computing, 10 ms waiting, and two collectives of 50 ms that overlap."""
    made = []
    for step in (7, 8):
        start = 1_700_000_000 * 1000 * MS + step * 100 * MS
        made += [
            Span("blocks.0 forward", Track.COMPUTE, start, start + 30 * MS, step),
            Span(f"gather {NASTY}", Track.EXPOSED, start + 30 * MS, start + 40 * MS, step),
            Span("blocks.0 backward", Track.COMPUTE, start + 40 * MS, start + 70 * MS, step),
            Span("all_gather blocks.1", Track.COMMUNICATION, start, start + 50 * MS, step, 5_000_000),
            Span("reduce_scatter blocks.0", Track.COMMUNICATION, start + 40 * MS, start + 90 * MS, step, 5_000_000),
        ]
    return RankSpans(rank, f"host:{rank}", tuple(made))


def run_record(**changes: Any) -> RunRecord:
    steps = [StepRecord(s, s * 0.1, 5.5 / s, 1e-3 * s, 1000.0 + s, 1.0, 0.1) for s in range(1, 21)]
    ranks = [RankRecord(rank, f"127.0.0.1:{7000 + rank}", "node", 2**20 * 10, 2**30, 2**30, 0.4, 2.0) for rank in range(2)]
    values: dict[str, Any] = {
        "title": f"A run {NASTY}",
        "started": datetime(2024, 2, 3, 4, 5, 6, tzinfo=UTC),
        "duration_s": 2.0,
        "parameters": 1_234_567,
        "unsharded_bytes": 2**20 * 20,
        "steps": steps,
        "validations": [Validation(10, 2.5), Validation(20, 1.234)],
        "ranks": ranks,
        "timeline": [spans(0), spans(1)],
        "prompt": "def ",
        "sample": NASTY,
        "config": {"steps": 20, "text": NASTY},
        "versions": {"shardnet": "1.2.3"},
    }
    return RunRecord(**(values | changes))


def written(path: Path, **changes: Any) -> str:
    write_report(path / "report.html", run_record(**changes))
    return (path / "report.html").read_text(encoding="utf-8")


def embedded(page: str) -> Any:
    found = re.search(r'<script id="run-data" type="application/json">(.*?)</script>', page, re.DOTALL)
    assert found
    return json.loads(found[1])


@given(st.text())
def test_any_text_survives_embedding_and_ends_no_element(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    data = embedded(written(tmp_path_factory.mktemp("page"), sample=text, config={text: text}))
    assert data["sample"] == text
    assert data["config"] == {text: text}


def test_text_from_outside_cannot_become_markup(tmp_path: Path) -> None:
    page = written(tmp_path)
    assert NASTY not in page
    assert page.count("</script>") == 2
    assert "<!--" not in page
    assert f"<title>{html.escape('A run ' + NASTY)}</title>" in page
    assert embedded(page)["sample"] == NASTY


def test_the_page_needs_nothing_but_itself(tmp_path: Path) -> None:
    page = written(tmp_path).replace("http://www.w3.org/2000/svg", "")  # an XML namespace's name, never fetched
    assert not re.search(r"https?://|\bsrc=|<link|@import|url\(|fetch\(|import\(", page)


def test_numbers_that_json_cannot_hold_become_null() -> None:
    steps = [StepRecord(1, 0.1, math.nan, 1e-3, math.inf, 1.0, 0.0)]
    data = page_data(run_record(steps=steps, validations=[Validation(1, -math.inf)]))
    assert data["steps"][0]["loss"] is data["steps"][0]["tokens_per_s"] is data["validations"][0]["loss"] is None
    assert json.dumps(data, allow_nan=False)


def test_the_headline_says_how_it_went() -> None:
    figures = {figure["label"]: (figure["value"], figure["note"]) for figure in page_data(run_record())["figures"]}
    assert figures["validation loss"][0] == "1.234"
    assert figures["training loss"] == ("0.2750", "in the last step; 5.500 in the first")
    assert figures["speed"][0] == "1,010", "between the tenth and the eleventh of twenty"
    assert figures["waiting"] == ("20.0 %", "of the time compute waited for communication, on the rank that waited most")
    assert figures["world"] == ("2 ranks", "on 1 node")
    assert figures["parameters"][0] == "1.23 M"
    assert figures["held per rank"] == ("10.0 MiB", "of 20.0 MiB unsharded, optimizer included")
    assert figures["steps"] == ("20", "in 2.0 s")


def test_a_small_loss_is_shown() -> None:
    figures = page_data(run_record(validations=[Validation(20, 2.662e-6)]))["figures"]
    assert figures[0]["value"] == "2.662e-06"


def test_a_long_run_is_drawn_by_some_of_its_steps_and_all_of_its_spikes() -> None:
    def step(number: int) -> StepRecord:
        loss = {70_001: 99.0, 70_002: math.nan, 70_003: -1.0}.get(number, 1.0)
        return StepRecord(number, 0.1 * number, loss, 1e-3, 5000.0 - (number == 555), 1.0 + (number == 31), 0.1 * (number == 99_998))

    data = page_data(run_record(steps=[step(number) for number in range(1, 100_001)]))
    drawn = {each["step"]: each for each in data["steps"]}
    assert list(drawn) == sorted(drawn)
    assert 2000 <= len(drawn) <= MAX_STEPS
    assert {1, 31, 555, 70_001, 70_003, 99_998, 100_000} <= set(drawn)
    assert max(after - before for before, after in pairwise(drawn)) <= 50
    assert next(each["value"] for each in data["figures"] if each["label"] == "steps") == "100,000"


def test_a_rank_waits_for_a_share_of_its_own_time() -> None:
    """Rank 0 has come in the place of another one that died, long after rank 1 began."""
    ranks = [
        RankRecord(rank, "", "node", 0, 0, 0, exposed_s, took_s) for rank, (exposed_s, took_s) in enumerate([(0.5, 2.0), (3.0, 100.0)])
    ]
    (waiting,) = (each["value"] for each in page_data(run_record(ranks=ranks))["figures"] if each["label"] == "waiting")
    assert waiting == "25.0 %"


def test_the_timeline_begins_at_zero_and_keeps_every_span() -> None:
    timeline = page_data(run_record())["timeline"]
    lanes = [(lane["track"], lane["spans"]) for lane in timeline["ranks"][1]["lanes"]]
    assert [track for track, _ in lanes] == ["compute", "exposed", "communication", "communication"]
    assert sum(len(rows) for _, rows in lanes) == 10
    name, start_us, duration_us, size, step = lanes[2][1][0]
    assert (timeline["names"][name], start_us, duration_us, size, step) == ("all_gather blocks.1", 0.0, 50_000.0, 5_000_000, 7)


def test_a_run_that_did_nothing_still_has_a_page(tmp_path: Path) -> None:
    empty = written(tmp_path, steps=[], validations=[], ranks=[], timeline=[], sample="", duration_s=0.0)
    assert embedded(empty)["figures"][0]["value"] == "–"


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    if not CHROMIUM:
        pytest.skip("no browser to draw the page in: Chromium is not installed (apt-get install chromium)")
    folder = tmp_path_factory.mktemp("browser")
    written(folder)
    with browser(folder / "profile") as opened:
        opened.open((folder / "report.html").as_uri())
        yield opened


def shares(page: Page) -> list[str]:
    cells: list[str] = page.evaluate(
        "[...document.querySelectorAll('#timeline-shares tbody tr:first-child td')].map((cell) => cell.textContent)"
    )
    return cells


def test_a_browser_draws_all_of_it_without_an_error(page: Page) -> None:
    assert page.evaluate("document.documentElement.dataset.rendered") == "yes"
    assert page.evaluate("document.querySelectorAll('.chart svg path').length") >= 10
    assert page.evaluate("document.querySelectorAll('.chart svg path[d*=NaN]').length") == 0
    assert page.evaluate("document.getElementById('failure').hidden") is True
    assert page.evaluate("document.getElementById('sample').textContent") == f"def {NASTY}"
    assert page.evaluate("typeof window.hacked") == "undefined"
    assert page.errors == []


def test_the_timeline_is_painted_and_its_shares_are_counted(page: Page) -> None:
    colours = "new Set(document.getElementById('timeline').getContext('2d').getImageData(95, 40, 800, 140).data).size"
    assert page.evaluate(colours) > 10
    # 190 ms: twice 60 ms computing, 10 ms waiting, 90 ms communicating of which 10 ms are waited for.
    assert shares(page) == ["63.2 %", "10.5 %", "94.7 %", "88.9 %"]


def test_keys_zoom_and_move_the_timeline(page: Page) -> None:
    page.evaluate("document.getElementById('timeline').focus()")
    everything = shares(page)
    page.press("1")
    one_step = shares(page)
    page.press("+", text="+")
    page.press("ArrowLeft")
    assert len({tuple(everything), tuple(one_step), tuple(shares(page))}) == 3
    page.press("0")
    assert shares(page) == everything
    assert page.errors == []


def test_pointing_at_a_span_or_a_curve_tells_what_it_is(page: Page) -> None:
    tooltip = "document.getElementById('tooltip').hidden ? '' : document.getElementById('tooltip').innerText"
    for target, share_x, share_y, expected in (
        ("#timeline", 0.15, None, "computing of rank 0, step 7"),
        ("#loss-chart svg", 0.5, 0.5, "training: "),
    ):
        box = page.evaluate(
            f"(() => {{ const one = document.querySelector('{target}'); one.scrollIntoView({{ block: 'center' }});"
            " const { x, y, width, height } = one.getBoundingClientRect(); return [x, y, width, height]; })()"
        )
        page.point(box[0] + share_x * box[2], box[1] + (60 if share_y is None else share_y * box[3]))
        assert expected in page.evaluate(tooltip)
    assert page.errors == []


def test_text_of_a_chart_keeps_its_size_on_a_narrow_screen(page: Page) -> None:
    page.evaluate(
        "document.body.style.width = '400px'; byId('loss-chart').replaceChildren(); fillCharts(JSON.parse(byId('run-data').textContent))"
    )
    scale = page.evaluate(
        "(() => { const svg = document.querySelector('#loss-chart svg'); return svg.clientWidth / svg.viewBox.baseVal.width; })()"
    )
    assert 0.95 < scale < 1.05
    assert page.errors == []
