"""The page in a real browser: with a real training, one of whose workers is killed, and with made-up stories."""

import re
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from shardnet.loop import LoopThread
from shardnet.observation.views import ClusterView
from shardnet.telemetry import Progress
from shardnet.traffic import Traffic
from shardnet.web.page_port import PagePort
from shardnet.web.story import Story
from tests.browser import CHROMIUM, Page, browser
from tests.cli.launched import Launched
from tests.observation.views import cluster, stats, worker
from tests.training.workers import Nursery, Worker

SOON_S = 20.0  # far above what anything here takes
NASTY = "<img src=x onerror=hacked=1>&amp;\"'"
HERE = "127.0.0.1:0"


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    if not CHROMIUM:
        pytest.skip("no browser to draw the page in: Chromium is not installed (apt-get install chromium)")
    with browser(tmp_path_factory.mktemp("browser")) as opened:
        yield opened


def show(page: Page, url: str) -> None:
    page.open(url)
    page.errors.clear()
    page.requests.clear()
    page.resize(1280, 900)


def troubles(page: Page) -> list[str]:
    """The errors of the browser's console. Other tests make and remove networks meanwhile: then Chromium and the page only ask again."""
    return [error for error in page.errors if "ERR_NETWORK_CHANGED" not in error]


@pytest.mark.timeout(120)
def test_a_training_of_which_one_worker_is_killed(nursery: Nursery, tmp_path: Path, page: Page) -> None:
    with Launched(tmp_path, "rendezvous", "--listen", HERE, "--web", HERE) as rendezvous, ExitStack() as stack:
        *_, last = rendezvous.read_lines(4)
        assert last.startswith("rendezvous: page at http://127.0.0.1:"), last
        url = last.split()[-1]
        address = rendezvous.read_lines(1)[0].split()[3].rstrip(";")
        page.open(url)
        page.wait_for("document.getElementById('none').hidden === false", SOON_S)
        assert page.texts("#how") == [f"shardnet run --rendezvous {address} --nproc 2 train.py"]

        workers = [stack.enter_context(Worker(nursery, address)) for _ in range(4)]
        for number, each in enumerate(workers):
            each.tell(job="lm", world_size=4, node=("alpha", "beta")[number // 2], work="endure", steps=1_000_000)
        for each in workers:
            each.hear("joined")
        check_training(page)
        nodes = page.texts(".node .name")

        killed = next(each for each in workers if each.rank == 3)
        killed.signal(signal.SIGKILL)
        for each in workers:
            if each is not killed:
                each.hear("bereft")
        check_death(page, nodes)
        assert troubles(page) == []
        assert {request.partition(url)[0] for request in page.requests} == {""}, "nothing is asked of anybody else"

        rendezvous.process.send_signal(signal.SIGINT)
        assert rendezvous.finish().status == 0
        page.wait_for("document.body.classList.contains('stale')", SOON_S)
        silence = page.texts("#silence")[0]
        assert re.fullmatch(r"No answer from 127\.0\.0\.1:\d+ since \d\d:\d\d:\d\d\. This is the last picture\.", silence)
        assert len(page.texts(".worker")) == 4
        for each in workers:
            if each is not killed:
                each.tell(stop=True)
                each.hear("left")


def check_training(page: Page) -> None:
    page.wait_for("document.querySelectorAll('.worker.well, .worker.late').length === 4", SOON_S)
    page.wait_for("document.querySelector('#plot-traffic path.series') && document.querySelector('#plot-step path.series')", SOON_S)
    page.wait_for("document.querySelector('path.network') && document.querySelector('path.memory')", SOON_S)
    page.wait_for("document.querySelectorAll('.between .rate').length === 2", SOON_S)
    assert (page.texts("#name"), page.texts("#state")) == (["lm"], ["running"])
    assert page.texts(".worker .rank") == ["0", "1", "2", "3"]
    assert page.texts("#routing")[0].startswith("hierarchical: a ring of 2 nodes")
    first, second = page.texts(".node .name")
    assert {first, second} == {"alpha", "beta"}
    assert all(re.fullmatch(r"[\d.]+ ([KMG]i)?B/s", rate) for rate in page.texts(".between .rate"))
    figures = dict(zip(page.texts("#figures dt"), page.texts("#figures dd:nth-child(2)"), strict=True))
    assert re.fullmatch(r"[\d,]+ of 1,000,000", figures["step"])
    assert (figures["workers"], figures["epoch"].strip()) == ("4 of 4", "1")
    assert float(figures["loss"]) > 0
    assert figures["tokens a second"].strip() != "–"
    assert page.texts("#workers tbody .node") == [first, first, second, second]
    page.wait_for("new Set([...document.querySelectorAll('#workers td.number')].map((each) => each.textContent)).size > 4", SOON_S)
    for plot in ("tokens", "traffic", "step", "loss"):
        assert len(page.texts(f"#plot-{plot} text.y")) >= 2, plot
        assert page.evaluate(f"document.querySelectorAll('#plot-{plot} path[d*=NaN]').length") == 0


def check_death(page: Page, nodes: list[str]) -> None:
    page.wait_for("document.querySelector('.worker.dead')", SOON_S)
    assert page.texts(".worker.dead .rank") == ["3"]
    assert page.texts(".worker.dead .badge") == ["×"], "its shape tells it, too"
    assert page.texts(".worker.dead .condition")[0] in ("gone", "unreachable")
    assert page.texts("tr.dead th") == ["3"]
    page.wait_for("document.querySelectorAll('.worker.paused').length === 3", SOON_S)
    told = "(each) => /rank 3 .*, (alpha|beta). is (gone|unreachable)/.test(each.textContent)"
    page.wait_for(f"[...document.querySelectorAll('#events .bad')].some({told})", SOON_S)
    assert re.match(r"\d\d:\d\d:\d\d", page.texts("#events li")[0])
    assert page.texts(".node .name") == nodes, "it is still known where it was"


# --- made-up stories


@contextmanager
def told(*views: ClusterView) -> Iterator[tuple[str, Story]]:
    """Serve the page of a story of these looks, which are a second apart and end now."""
    loop = LoopThread.shared()
    story = Story()
    now_s = time.time()
    for number, view in enumerate(views):
        story.add(now_s - len(views) + number, float(number), view)
    port = PagePort(HERE, story)
    loop.run(port.start()).result()
    try:
        yield port.url, story
    finally:
        loop.run(port.aclose()).result()


def sample(second: int, size: int = 4, nodes: int = 2, name: str = NASTY) -> ClusterView:
    per_node = size // nodes
    workers = []
    for rank in range(size):
        peers = {peer: Traffic(1_000_000 * second, 2_000_000 * second) for peer in range(size) if peer != rank}
        progress = Progress(second, 400, 5.0 - second / 10, 1234.5, 0.1, NASTY)
        said = stats(
            step=4 * second, uptime_s=second, progress=progress, peers=peers, bytes_sent=3_000_000 * second, late={1: 0.5 * second}
        )
        workers.append(replace(worker(rank, said), node=f"{name}{rank // per_node}"))
    view = cluster(*workers)
    return replace(view, jobs=(replace(view.jobs[0], job=name),))


def test_names_stay_text(page: Page) -> None:
    states = [replace(sample(second), health="serving" if second < 3 else NASTY) for second in range(4)]
    (job,) = states[-1].jobs
    with told(*states[:-1], replace(states[-1], jobs=(replace(job, job=f"{NASTY} 2"), job))) as (url, _):
        show(page, url)
        page.wait_for("document.querySelectorAll('.worker').length === 4 && document.querySelectorAll('#events li').length > 0", SOON_S)
        assert page.texts("#name") == [NASTY]
        assert NASTY in page.texts("#place")[0]
        assert NASTY in page.texts("#jobs button")[0]
        assert any(NASTY in text for text in page.texts("#events li"))
        assert page.texts("#workers tbody .node")[0] == f"{NASTY}0"
        assert page.evaluate("document.querySelectorAll('img').length") == 0
        assert page.evaluate("typeof window.hacked") == "undefined"
        assert troubles(page) == []


def test_a_job_is_chosen_and_kept(page: Page) -> None:
    views = [sample(second, name="first") for second in range(4)]
    (job,) = views[-1].jobs
    other = replace(job, job="the other", state="finished", workers=())
    with told(*views[:-1], replace(views[-1], jobs=(job, other))) as (url, _):
        show(page, url)
        page.wait_for("document.querySelectorAll('#jobs button').length === 2", SOON_S)
        assert page.texts("#jobs button[aria-pressed=true] b") == ["first"]
        page.evaluate("document.querySelectorAll('#jobs button')[1].click()")
        page.wait_for("document.getElementById('name').textContent === 'the other'", SOON_S)
        assert page.texts("#ring .nobody") == ["all workers have left"]
        assert page.evaluate("location.hash") == "#job=the+other"
        page.reload()
        page.wait_for("document.getElementById('name').textContent === 'the other'", SOON_S)
        assert troubles(page) == []


def test_pointing_at_a_moment_tells_it_in_all_plots_and_at_a_worker_who_it_is(page: Page) -> None:
    with told(*(sample(second, name="node") for second in range(30))) as (url, _):
        show(page, url)
        page.wait_for("document.querySelector('#plot-loss path.series')", SOON_S)
        assert page.texts(".worker.late .rank") == ["1"]
        assert page.texts(".worker.late .condition") == ["late 50 %"]
        x, y = middle(page, "#plot-loss")
        page.point(x, y)
        page.wait_for("document.querySelectorAll('.plot .cursor').length === 4", SOON_S)
        assert all(re.match(r"\d\d:\d\d:\d\d, step \d+: .*\d", text) for text in page.texts(".plot output"))
        page.point(*middle(page, ".worker[data-rank='2'] .body"))
        page.wait_for("!document.getElementById('tip').hidden", SOON_S)
        assert page.texts("#tip span")[:3] == ["rank 2: serving", "node1", "10.0.0.2:7001"]
        assert page.texts(".plot .cursor") == []
        assert troubles(page) == []


@pytest.mark.parametrize(
    ("begins", "named"),
    [
        ([20, 22], ["epoch 3"]),  # one label for two lines that are close to each other
        ([2, 4], ["epoch 3"]),  # there is no room to the left of the second line
        ([3, 25], ["epoch 3", "epoch 2"]),
    ],
)
def test_words_at_the_beginnings_of_epochs_keep_out_of_each_others_way(page: Page, begins: list[int], named: list[str]) -> None:
    views = [sample(second, name="node") for second in range(30)]
    epochs = [1 + sum(second >= begin for begin in begins) for second in range(30)]
    dated = [replace(view, jobs=(replace(view.jobs[0], epoch=epoch),)) for view, epoch in zip(views, epochs, strict=True)]
    with told(*dated) as (url, _):
        show(page, url)
        page.wait_for("document.querySelectorAll('#plot-loss line.epoch').length === 2", SOON_S)
        assert page.texts("#plot-loss text.epoch") == named
        assert page.evaluate(OVERLAPS) == []
        assert troubles(page) == []


OVERLAPS = """(() => {
    const frame = document.querySelector('#plot-loss').getBoundingClientRect();
    const boxes = [...document.querySelectorAll('#plot-loss text.epoch')].map((each) => each.getBoundingClientRect());
    const isOut = (box) => box.left < frame.left || box.right > frame.right;
    const meets = (box, index) => boxes.some((other, at) => at !== index && box.left < other.right && other.left < box.right);
    return boxes.filter((box, index) => isOut(box) || meets(box, index)).map((box) => [box.left, box.right]);
})()"""


def middle(page: Page, selector: str) -> tuple[float, float]:
    box = f"document.querySelector({selector!r}).getBoundingClientRect()"
    x, y = page.evaluate(f"(() => {{ const {{ x, y, width, height }} = {box}; return [x + width / 2, y + height / 2]; }})()")
    return x, y


@pytest.mark.parametrize(("size", "nodes"), [(1, 1), (2, 1), (16, 4), (16, 8), (24, 1)])
def test_it_fits_whatever_the_width_is(page: Page, size: int, nodes: int) -> None:
    name = "gpu-worker.a-long-domain.internal.example.org"
    with told(*(sample(second, size, nodes, name) for second in range(4))) as (url, _):
        show(page, url)
        page.wait_for(f"document.querySelectorAll('.worker').length === {size}", SOON_S)
        for width in (360, 768, 1280, 2000):
            page.resize(width, 900)
            assert page.evaluate("innerWidth") == width
            assert page.evaluate("document.documentElement.scrollWidth") <= width
            assert outside(page) == [], width
        assert troubles(page) == []


def outside(page: Page) -> list[str]:
    """Texts of the ring and the plots that stick out of their picture, and workers that overlap."""
    found: list[str] = page.evaluate(
        """(() => {
          const within = (a, b) => a.left >= b.left - 1 && a.right <= b.right + 1 && a.top >= b.top - 1 && a.bottom <= b.bottom + 1;
          const texts = [...document.querySelectorAll('#ring text, .plot text')]
            .filter((text) => text.textContent && !within(text.getBoundingClientRect(), text.ownerSVGElement.getBoundingClientRect()));
          const bodies = [...document.querySelectorAll('.worker .body')].map((body) => body.getBoundingClientRect());
          const gap = (a, b) => Math.hypot(a.x + a.width / 2 - b.x - b.width / 2, a.y + a.height / 2 - b.y - b.height / 2) - a.width;
          const touching = bodies.filter((a, i) => bodies.some((b, j) => i < j && gap(a, b) < 0));
          return [...texts.map((text) => text.textContent), ...touching.map(() => 'workers lie on each other')];
        })()"""
    )
    return found
