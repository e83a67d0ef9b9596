"""Only `linear` multiplies by weights: NumPy's own products choose the order of their sums by the shape."""

import ast
from pathlib import Path

import pytest

ENGINE = Path(__file__).resolve().parents[3] / "engine"
FILES = sorted([*(ENGINE / "ops/cpu").rglob("*.py"), *(ENGINE / "model").rglob("*.py")])
FORBIDDEN = {"dot", "vdot", "matmul", "einsum", "inner", "tensordot", "multi_dot", "matvec", "vecmat", "vecdot"}


def products(source: str) -> list[int]:
    """Lines with `@` between values, or with a call or attribute of NumPy that is a product."""
    lines = []
    for node in ast.walk(ast.parse(source)):
        operator = isinstance(node, ast.BinOp | ast.AugAssign) and isinstance(node.op, ast.MatMult)
        if operator or (isinstance(node, ast.Attribute) and node.attr in FORBIDDEN):
            lines.append(node.lineno)
    return lines


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(ENGINE).as_posix())
def test_no_product_but_linear(path):
    assert not products(path.read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    "source", ["a @ b", "a @= b", "np.dot(a, b)", "a.dot(b)", "np.matmul(a, b)", "np.einsum('i,i', a, b)"]
)
def test_the_search_finds_products(source):
    assert products(source) == [1]
