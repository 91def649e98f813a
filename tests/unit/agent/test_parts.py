"""Each part of the agent is given what it needs when it is made, and none knows everything."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import nri_numa.agent

MAX_METHODS, MAX_ATTRIBUTES = 26, 12
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
MODULES = sorted(Path(nri_numa.agent.__path__[0]).glob("*.py"))


def own_names(function: ast.AST) -> set[str]:
    """``self``, and variables of a function that are no parameters."""
    stores = (n for n in ast.walk(function) if isinstance(n, ast.Name))
    return {"self"} | {n.id for n in stores if isinstance(n.ctx, ast.Store)}


def assigned_attributes(tree: ast.AST) -> Iterator[tuple[str, bool]]:
    """Attributes that functions assign, and whether they are of ``self`` or of a local record."""
    for function in ast.walk(tree):
        if isinstance(function, FUNCTIONS):
            names = own_names(function)
            for node in ast.walk(function):
                if isinstance(node, ast.Attribute) and isinstance(node.ctx, (ast.Store, ast.Del)):
                    base = node.value
                    yield ast.unparse(node), isinstance(base, ast.Name) and base.id in names


@pytest.mark.parametrize("module", MODULES, ids=lambda path: path.stem)
def test_no_part_is_changed_from_outside(module: Path) -> None:
    found = assigned_attributes(ast.parse(module.read_text()))
    assert [name for name, is_own in found if not is_own] == []


@pytest.mark.parametrize("module", MODULES, ids=lambda path: path.stem)
def test_no_part_knows_everything(module: Path) -> None:
    for made in ast.walk(ast.parse(module.read_text())):
        if isinstance(made, ast.ClassDef):
            methods = [
                n for n in made.body if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef))
            ]
            attributes = {n for n, _ in assigned_attributes(made) if n.startswith("self.")}
            assert len(methods) <= MAX_METHODS, made.name
            assert len(attributes) <= MAX_ATTRIBUTES, made.name
