"""The mutants of a module: cosmic-ray's operators, and statements that are left out.

cosmic-ray replaces each operator by every other one; of those the ones are taken that somebody
could have written by mistake. It leaves no statement out, which is the mistake that is made most,
so that is done here.
"""

import ast
import contextlib
import hashlib
import json
from collections.abc import Iterator
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Final

_OPERATORS: Final = (
    "AddNot",
    "ReplaceTrueWithFalse",
    "ReplaceFalseWithTrue",
    "ReplaceAndWithOr",
    "ReplaceOrWithAnd",
    "ReplaceBreakWithContinue",
    "ReplaceContinueWithBreak",
    "ReplaceUnaryOperator_Delete_Not",
    "ReplaceUnaryOperator_Delete_USub",
    "NumberReplacer",
    "ZeroIterationForLoop",
    *(
        f"ReplaceBinaryOperator_{pair}"
        for pair in (
            *("Add_Sub", "Sub_Add", "Mul_FloorDiv", "FloorDiv_Mul", "Mod_FloorDiv"),
            *("BitOr_BitAnd", "BitAnd_BitOr", "BitXor_BitOr", "Sub_BitOr", "Sub_BitAnd"),
            *("LShift_RShift", "RShift_LShift"),
        )
    ),
    *(
        f"ReplaceComparisonOperator_{pair}"
        for pair in (
            *("Lt_LtE", "LtE_Lt", "Gt_GtE", "GtE_Gt", "Lt_GtE", "LtE_Gt", "Gt_LtE", "GtE_Lt"),
            *("Eq_NotEq", "NotEq_Eq", "Is_IsNot", "IsNot_Is", "LtE_Eq", "GtE_Eq"),
        )
    ),
)


_TYPES: Final = "ReplaceBinaryOperator_BitOr"
"""In an annotation this is a type and no operation."""


@dataclass(frozen=True, slots=True)
class Mutant:
    """One change of one module.

    Attributes:
        line: number of the line, from 1.
        after: that line as it becomes; more lines are joined.
    """

    module: str
    operator: str
    line: int
    before: str
    after: str
    code: str

    @property
    def key(self) -> str:
        """Names it for as long as the module stays as it is."""
        return hashlib.sha256(f"{self.module}\0{self.code}".encode()).hexdigest()[:20]


def mutants(repository: Path, module: str, work: Path) -> list[Mutant]:
    """All mutants of a module, each once, in the order of their lines."""
    source = (repository / module).read_text(encoding="utf-8")
    same = hashlib.sha256(f"{source}\0{Path(__file__).read_text()}".encode()).hexdigest()[:12]
    kept = work / "mutants" / f"{module.replace('/', '.')}-{same}.json"
    if not kept.exists():
        kept.parent.mkdir(parents=True, exist_ok=True)
        made = [astuple(mutant) for mutant in _made(source, module)]
        kept.write_text(json.dumps(made), encoding="utf-8")
    return [Mutant(*each) for each in json.loads(kept.read_text(encoding="utf-8"))]


def _made(source: str, module: str) -> list[Mutant]:
    silent, annotated = _silent_lines(source)
    found: dict[str, Mutant] = {}
    for operator, code in (*_replaced(source), *_left_out(source)):
        line, before, after = _difference(source, code)
        if line in silent or (operator.startswith(_TYPES) and line in annotated):
            continue
        with contextlib.suppress(SyntaxError):
            ast.parse(code)
            found.setdefault(code, Mutant(module, operator, line, before, after, code))
    return sorted(found.values(), key=lambda one: (one.line, one.operator, one.code))


def _replaced(source: str) -> Iterator[tuple[str, str]]:
    # In an environment of its own, see requirements/mutation.in.
    import cosmic_ray.ast
    import cosmic_ray.mutating
    import cosmic_ray.plugins

    operators = {name: cosmic_ray.plugins.get_operator(f"core/{name}")() for name in _OPERATORS}
    for before, piece, after in _pieces(source):
        nodes = list(cosmic_ray.ast.ast_nodes(cosmic_ray.ast.get_ast(piece)))
        for name, operator in operators.items():
            places = sum(len(list(operator.mutation_positions(node))) for node in nodes)
            for number in range(places):
                code = cosmic_ray.mutating.mutate_code(piece, operator, number)
                if code is not None and code != piece:
                    yield name, f"{before}{code.removeprefix(_HEAD)}{after}"


_HEAD: Final = "class _:\n"
"""What a piece out of a class begins with, so that it can be read alone."""


def _pieces(source: str) -> Iterator[tuple[str, str, str]]:
    """What comes before, a statement of the module or of a class in it, and what comes after.

    Each mutant means to read and write the piece again, and that takes longer for a whole module.
    """
    lines = source.splitlines(keepends=True)
    for node in ast.parse(source).body:
        head, statements = (_HEAD, node.body) if isinstance(node, ast.ClassDef) else ("", [node])
        for statement in statements:
            decorators = getattr(statement, "decorator_list", [])
            first = min(each.lineno for each in (statement, *decorators)) - 1
            last = statement.end_lineno or statement.lineno
            before, piece, after = lines[:first], lines[first:last], lines[last:]
            yield "".join(before), head + "".join(piece), "".join(after)


def _left_out(source: str) -> Iterator[tuple[str, str]]:
    """With one statement less: a call, or something stored in an object."""
    lines = source.splitlines(keepends=True)
    for node in ast.walk(ast.parse(source)):
        stored = isinstance(node, ast.AugAssign) or (
            isinstance(node, ast.Assign) and not isinstance(node.targets[0], ast.Name | ast.Tuple)
        )
        called = isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)
        if isinstance(node, ast.stmt) and (stored or called):
            first, last = node.lineno - 1, (node.end_lineno or node.lineno) - 1
            kept = lines[first].encode()[: node.col_offset].decode()
            rest = lines[last].encode()[node.end_col_offset or 0 :].decode()
            yield "LeaveOut", "".join([*lines[:first], f"{kept}pass{rest}", *lines[last + 1 :]])


def _silent_lines(source: str) -> tuple[frozenset[int], frozenset[int]]:
    """Lines on which nothing happens when the program runs, and those with an annotation."""
    silent: set[int] = set()
    annotated: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.stmt):
            continue
        whole = range(node.lineno, (node.end_lineno or node.lineno) + 1)
        if isinstance(node, ast.AnnAssign):
            annotated.update(whole)
            if node.value is None:
                silent.update(whole)
        elif isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            silent.update(whole)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            annotated.update(range(node.lineno, node.body[0].lineno))
    return frozenset(silent), frozenset(annotated)


def _difference(source: str, code: str) -> tuple[int, str, str]:
    """Number of the first line that differs, and what it was and becomes."""
    old, new = source.splitlines(), code.splitlines()
    first = next(
        (i for i, (a, b) in enumerate(zip(old, new, strict=False)) if a != b),
        min(len(old), len(new)) - 1,
    )
    return first + 1, old[first].strip(), new[first].strip()
