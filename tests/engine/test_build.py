import shutil
from pathlib import Path

import pytest

from engine.build import _ROOT, build_id


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    return Path(shutil.copytree(_ROOT, tmp_path / "engine", ignore=shutil.ignore_patterns("__pycache__")))


def test_a_copy_is_the_same_build(tree: Path) -> None:
    assert build_id(tree) == build_id()
    assert len(build_id()) == 16


def test_every_change_of_the_sources_is_another_build(tree: Path) -> None:
    seen = {build_id(tree)}
    (tree / "messages.py").write_text((tree / "messages.py").read_text() + "\n")
    seen.add(build_id(tree))
    (tree / "new.py").write_text("")
    seen.add(build_id(tree))
    (tree / "new.py").rename(tree / "newer.py")
    seen.add(build_id(tree))
    (tree / "newer.py").unlink()
    seen.add(build_id(tree))
    assert len(seen) == 4


def test_what_is_no_source_does_not_count(tree: Path) -> None:
    before = build_id(tree)
    (tree / "__pycache__").mkdir()
    (tree / "__pycache__" / "messages.cpython-311.pyc").write_bytes(b"x")
    (tree / "notes.txt").write_text("x")
    assert build_id(tree) == before
