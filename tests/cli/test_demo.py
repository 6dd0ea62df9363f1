"""`shardnet demo`: the real program with the real launcher, as small as possible."""

from pathlib import Path

from tests.cli.launched import shardnet

TINY = ("--steps", "2", "--dim", "16", "--layers", "1", "--heads", "1", "--context", "32", "--bigrams", "0")
SHORT = ("--valid-windows", "2", "--sample-bytes", "4")


def test_it_trains_and_tells_where_the_report_is(tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.mkdir()
    (text / "prose.txt").write_text("to be or not to be, that is the question. " * 500)
    result = shardnet(tmp_path, "demo", "--out", "out", "--text", str(text), *TINY, *SHORT)
    assert result.status == 0, result.err
    report = tmp_path / "out" / "report.html"
    assert result.out.splitlines()[-1] == f"The report of this run, to open in a browser: {report.as_uri()}"
    assert report.read_text().lstrip().lower().startswith("<!doctype html>")
    assert "over 2 ranks" in result.out
    assert "[0] speed: 2 steps of 2 ranks, " in result.out
