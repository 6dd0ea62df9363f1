"""The examples on the page about observing work as they stand, and name only series that are served; so does the dashboard beside it."""

import asyncio
import json
import re
import sys
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import Metric

from shardnet.config import Limits, Timeouts
from shardnet.loop import LoopThread
from shardnet.pb import stats_pb2
from shardnet.transport.endpoint import Endpoint
from shardnet.transport.metrics import SnapshotMetrics

DOCS = Path(__file__).parent.parent / "docs"
PAGE = (DOCS / "observing.md").read_text()
NAME = re.compile(r"\bshardnet_[a-z_]+\b")
REPLIES = (stats_pb2.SnapshotReply(role="worker", bounds_s=[1.0], steps={"counts": [0, 0]}), stats_pb2.SnapshotReply(role="rendezvous"))
UNITS = {"none", "s", "percentunit", "cps", "Bps", "bytes"}  # as Grafana calls them


def served() -> dict[str, Metric]:
    """Metric families, by their names in the text; a counter's name has its `_total`."""
    families = [family for reply in REPLIES for family in SnapshotMetrics(reply).collect()]
    return {f"{family.name}_total" if family.type == "counter" else family.name: family for family in families}


def queried(name: str) -> str:
    """The family that a time series in a query belongs to: a histogram has three series, which appear only in queries."""
    return re.sub(r"_(bucket|count|sum)$", "", name)


@pytest.mark.timeout(180)  # starts fresh interpreters, maybe on a slow machine
@pytest.mark.parametrize(
    ("program", "lines"),
    [("healthy.py", ["NOT_SERVING", "SERVING", "NOT_SERVING"]), ("look.py", ["rank 0/2 epoch 1 step 7: 3 all_gather"])],
)
async def test_the_programs_of_the_page(tmp_path: Path, program: str, lines: list[str]) -> None:
    (text,) = re.findall(rf"```python\n# {program}\n(.*?)```", PAGE, re.DOTALL)
    (tmp_path / program).write_text(text)
    collectives = [stats_pb2.CollectiveStats(op="all_gather", count=3)]
    reply = stats_pb2.SnapshotReply(role="worker", world_size=2, epoch=1, step=7, collectives=collectives)
    loop = LoopThread.shared()
    endpoint = Endpoint("127.0.0.1:0", limits=Limits(), timeouts=Timeouts.for_tests(), snapshot=lambda: reply)
    await loop.run_here(endpoint.start())
    command = (sys.executable, program, endpoint.address)
    process = await asyncio.create_subprocess_exec(*command, cwd=tmp_path, stdout=asyncio.subprocess.PIPE)
    try:
        assert process.stdout is not None
        heard = [await process.stdout.readline()]
        loop.call(endpoint.set_serving, True)
        heard += [await process.stdout.readline() for _ in lines[1:2]]
    finally:
        await loop.run_here(endpoint.aclose())
    heard += (await process.communicate())[0].splitlines()
    assert process.returncode == 0
    assert [line.decode().strip() for line in heard][: len(lines)] == lines


def test_the_page_names_all_that_is_served_and_nothing_else() -> None:
    table = "\n".join(line for line in PAGE.splitlines() if line.startswith("| `shardnet_"))
    assert set(NAME.findall(table)) == set(served())
    assert {queried(name) for name in NAME.findall(PAGE)} <= set(served())


def dashboard() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((DOCS / "grafana.json").read_text())
    return found


def test_the_dashboard_asks_for_what_is_served() -> None:
    families = served()
    expressions = [target["expr"] for panel in dashboard()["panels"] for target in panel["targets"]]
    expressions += [each["query"]["query"] for each in dashboard()["templating"]["list"] if each["type"] == "query"]
    assert len(expressions) > 20
    for expression in expressions:
        assert expression.count("(") == expression.count(")")
        for name in NAME.findall(expression):
            family = families[queried(name)]
            assert (family.type == "histogram") is (queried(name) != name), expression
            if family.type in ("counter", "histogram") and "max(" not in expression:
                assert re.search(rf"rate\({name}\b", expression), f"{expression}: a counter means something by its rate"


def test_the_dashboard_is_one_that_grafana_takes() -> None:
    board = dashboard()
    assert re.fullmatch(r"[\w-]{1,40}", board["uid"])
    assert board["title"]
    assert board["schemaVersion"] >= 36
    variables = {each["name"] for each in board["templating"]["list"]}
    panels = board["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    for panel in panels:
        place = panel["gridPos"]
        assert 0 <= place["x"] < place["x"] + place["w"] <= 24
        assert panel["fieldConfig"]["defaults"]["unit"] in UNITS
        assert panel["title"]
        assert panel["type"] in ("stat", "timeseries")
        assert len({target["refId"] for target in panel["targets"]}) == len(panel["targets"]) > 0
        used = set(re.findall(r"\$\{?(\w+)", json.dumps(panel))) - {"__rate_interval"}
        assert used <= variables
    for one, other in combinations([panel["gridPos"] for panel in panels], 2):
        beside = one["x"] + one["w"] <= other["x"] or other["x"] + other["w"] <= one["x"]
        assert beside or one["y"] + one["h"] <= other["y"] or other["y"] + other["h"] <= one["y"], f"{one} and {other} overlap"
