"""How checkpoints get their names and lose them, and what becomes of others: see the Notes in folder.py."""

import json
from pathlib import Path

import pytest

from shardnet.checkpoint.folder import Folder
from shardnet.checkpoint.manifest import Manifest
from tests.checkpoint.saving import committed, names_in


def id_of(path: Path) -> str:
    found: str = json.loads((path / "manifest.json").read_text().split("\n", 1)[1])["id"]
    return found


def test_nothing_is_put_aside_over_what_was(tmp_path: Path) -> None:
    folder = Folder(tmp_path, 1)
    for id_ in ("first", "second", "third"):
        committed(folder, 9, id_)
        committed(folder, 1, "low")
    assert {each.name: id_of(each) for each in tmp_path.iterdir()} == {
        "step-00000001": "low",
        "left-out-step-00000009": "first",
        "left-out-step-00000009-2": "second",
        "left-out-step-00000009-3": "third",
    }


class Killed(BaseException):
    """In place of kill -9: nothing can catch it and go on."""


@pytest.mark.parametrize("end", [OSError(5, "Input/output error"), Killed()], ids=["an error", "kill -9"])
def test_one_that_is_replaced_is_there_until_the_new_one_is(end: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the second of two renames does not take place."""
    folder = Folder(tmp_path, 1)
    committed(folder, 3, "old")
    rename = Path.rename

    def renamed(path: Path, target: Path) -> Path:
        if path == folder.unfinished("new"):
            raise end
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", renamed)
    with pytest.raises(type(end)):
        committed(folder, 3, "new")
    monkeypatch.undo()
    assert folder.steps() == [3]
    assert folder.of(3).name == ("step-00000003" if isinstance(end, OSError) else ".replaced-step-00000003")
    assert id_of(folder.of(3)) == "old"
    folder.begin("next")
    assert names_in(tmp_path) == {"step-00000003", ".unfinished-next"}
    assert id_of(folder.of(3)) == "old"
    committed(folder, 3, "newer")
    assert names_in(tmp_path) == {"step-00000003"}
    assert id_of(folder.of(3)) == "newer"


def test_what_is_no_checkpoint_stays(tmp_path: Path) -> None:
    """It only has the name of one."""
    (tmp_path / "step-00000001").mkdir()
    (tmp_path / "step-00000001" / "mine").write_text("data")
    (tmp_path / "step-00000002").write_text("data")
    folder = Folder(tmp_path, 2)
    for step in (1, 2):
        committed(folder, step, f"id{step}")
    assert folder.steps() == [2, 1]
    assert names_in(tmp_path) == {f"{prefix}step-0000000{step}" for prefix in ("", "left-out-") for step in (1, 2)}
    assert (tmp_path / "left-out-step-00000001" / "mine").read_text() == "data"
    assert (tmp_path / "left-out-step-00000002").read_text() == "data"


def test_of_a_link_to_a_checkpoint_only_the_link_is_removed(tmp_path: Path) -> None:
    folder = Folder(tmp_path / "run", 1)
    committed(folder, 1, "id1")
    folder.of(1).rename(tmp_path / "moved")
    folder.of(1).symlink_to(tmp_path / "moved")
    committed(folder, 2, "id2")
    assert names_in(folder.path) == {"step-00000002"}
    assert id_of(tmp_path / "moved") == "id1"


def test_what_dies_while_it_removes_leaves_nothing_that_looks_like_a_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = Folder(tmp_path, 1)
    monkeypatch.setattr("shutil.rmtree", lambda *_, **__: None)
    for step in (1, 2, 3):
        folder.unfinished(f"id{step}").mkdir()
        folder.commit(Manifest(f"id{step}", step, (), (), {}, (), ()))
    assert folder.steps() == [3]
    assert {name for name in names_in(tmp_path) if name.startswith("step-")} == {"step-00000003"}
    monkeypatch.undo()
    folder.sweep()
    assert names_in(tmp_path) == {"step-00000003"}
