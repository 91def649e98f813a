"""Puts a mutant into the functions of a running program, so that nothing is imported again."""

import gc
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FunctionType

_FUNCTION = 0x02
"""``inspect.CO_NEWLOCALS``: the code of a function, and not of a module or class."""


class Functions:
    """The functions of modules, as they are in memory now.

    Args:
        directory: only modules below it count.
    """

    def __init__(self, directory: Path) -> None:
        below = f"{directory}/"
        self._by_place: dict[tuple[str, str, int], list[FunctionType]] = {}
        for one in gc.get_objects():
            if isinstance(one, FunctionType) and one.__code__.co_filename.startswith(below):
                self._by_place.setdefault(_place(one.__code__), []).append(one)

    def replace(self, path: Path, before: str, after: str) -> bool:
        """Put other code in place of what differs.

        Returns:
            Whether that is all of the difference: what runs when a module is imported (constants,
            defaults, decorators) is none of a function's code. If not, nothing is changed.
        """
        codes = [compile(each, str(path), "exec", dont_inherit=True) for each in (before, after)]
        pairs = list(_differences(*codes))
        found = [(one, new) for old, new in pairs for one in self._by_place.get(_place(old), [])]
        if not found or any(new is None for _, new in pairs):
            return False
        for function, new in found:
            if new is not None:
                function.__code__ = new
        return True


def _place(code: CodeType) -> tuple[str, str, int]:
    return code.co_filename, code.co_qualname, code.co_firstlineno


def _differences(old: CodeType, new: CodeType) -> Iterator[tuple[CodeType, CodeType | None]]:
    """Code of functions that differs, with those inside; without a new one where there is none."""
    if _meaning(old) == _meaning(new):
        return
    inside = list(zip(_codes(old), _codes(new), strict=False))
    if old.co_flags & _FUNCTION:
        yield old, new if old.co_freevars == new.co_freevars else None
        if len(_codes(old)) == len(_codes(new)):
            for one, other in inside:
                yield from _differences(one, other)
        return
    if _meaning(old, inside=False) != _meaning(new, inside=False):
        yield old, None
        return
    for one, other in inside:
        yield from _differences(one, other)


def _codes(code: CodeType) -> list[CodeType]:
    return [one for one in code.co_consts if isinstance(one, CodeType)]


def _meaning(code: CodeType, *, inside: bool = True) -> tuple[object, ...]:
    """Everything but where the lines are."""
    constants = tuple(
        (_meaning(one) if inside else one.co_name) if isinstance(one, CodeType) else repr(one)
        for one in code.co_consts
    )
    return (
        code.co_code,
        constants,
        *(code.co_name, code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars),
        *(code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags),
        code.co_exceptiontable,
    )
