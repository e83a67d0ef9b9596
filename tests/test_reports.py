"""docs/reports.md: every case is there, and every test that it names exists."""

import ast
from pathlib import Path

ROOT = Path(__file__).parents[1]
CASES = 47


def rows() -> list[list[str]]:
    lines = (ROOT / "docs/reports.md").read_text(encoding="utf-8").splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("| ")]
    return [row for row in cells if row[0].isdecimal()]


def test_every_case_has_a_test_or_a_reason() -> None:
    assert [int(row[0]) for row in rows()] == list(range(1, CASES + 1))
    for row in rows():
        assert len(row) == 5
        assert all(row)
        assert row[3] == "none" or row[3].startswith("`tests/")


def test_every_test_that_is_named_exists() -> None:
    for row in rows():
        if row[3] != "none":
            path, name = row[3].strip("`").split("::")
            tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
            defined = {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
            assert name in defined, row
