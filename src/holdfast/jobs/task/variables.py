"""Variables of a task file: their values, missing values, and ${NAME} in other values."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from holdfast.jobs.task.document import Value
from holdfast.jobs.task.shape import TaskProblem

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_REFERENCE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)\}|\$([A-Za-z_][A-Za-z0-9_]*)\b")


def parse_variables(value: Value | None, given: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of a file and of the command line that have a value."""
    found: dict[str, str] = {}
    if value is not None:
        for item in value.items:  # secrets may be a list of names, whose values are given separately
            found.pop(str(item.plain), None)
        for name, member in value.members.items():
            if member.plain is not None:
                found[name] = _text(member.plain)
    return {**found, **given}


def variable_problems(
    value: Value | None, given: Mapping[str, str], *, where: str, option: str
) -> Iterator[TaskProblem]:
    """Yield problems of names that shells do not accept, and of variables without a value."""
    if value is None:
        return
    named = [(name, member.plain, value.key_lines[name]) for name, member in value.members.items()]
    named += [(str(item.plain), None, item.line) for item in value.items]
    for name, plain, line in named:
        if not is_variable_name(name):
            yield TaskProblem(line, f"{where}.{name}", f"expected the name of a variable, found {name!r}")
        elif "\0" in str(plain):
            yield TaskProblem(line, f"{where}.{name}", "expected a text without NUL characters")
        elif plain is None and name not in given:
            how = f"{option} {name}=VALUE, or {option} {name} if this shell has it"
            what = f"{name} has no value: give it here, or with {how}"
            yield TaskProblem(line, f"{where}.{name}", what)


def is_variable_name(text: str) -> bool:
    """Return True for a name that shells accept."""
    return _NAME.fullmatch(text) is not None


def fill_in(plain: Any, variables: Mapping[str, str]) -> Any:
    """Return a value with `${NAME}` and `$NAME` replaced by `variables` in all its texts."""
    if isinstance(plain, str):
        return _REFERENCE.sub(lambda found: variables.get(found[1] or found[2], found[0]), plain)
    if isinstance(plain, Mapping):
        return {fill_in(key, variables): fill_in(value, variables) for key, value in plain.items()}
    if isinstance(plain, list):
        return [fill_in(item, variables) for item in plain]
    return plain


def _text(plain: Any) -> str:
    """Return the text that a shell receives. As from SkyPilot, `yes` is True."""
    return str(plain)
