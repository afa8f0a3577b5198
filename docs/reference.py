"""Generator of docs/reference.md: signatures and docstrings of the public names, between hand-written text.

`python docs/reference.py` rewrites every block from `<!-- api NAME -->` to `<!-- /api -->`; `--check` only
compares. Options after the name leave things out: `-bare` the signature, `-attributes`, `-methods`, and
`-no_NAME` the methods whose names begin so.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import itertools
import re
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import holdfast

ROOT = Path(__file__).resolve().parent.parent
PATH = ROOT / "docs" / "reference.md"
PACKAGE = ROOT / "src" / "holdfast"
BLOCK = re.compile(r"<!-- api ([\w.]+)((?: -\w+)*) -->\n.*?<!-- /api -->\n", re.DOTALL)
SECTION = re.compile(r"(Args|Attributes|Returns|Yields|Raises|Ranks|Blocks|Source):(.*)")
TITLES = {"Args": "Options"}
WIDTH = 88


def main() -> int:
    """Write docs/reference.md; with `--check` only report whether it is current."""
    text = PATH.read_text()
    current = with_blocks(text)
    if sys.argv[1:] == ["--check"]:
        if current != text:
            sys.stderr.write("docs/reference.md differs from the docstrings: run docs/reference.py.\n")
        return int(current != text)
    PATH.write_text(current)
    return 0


def with_blocks(text: str) -> str:
    """Return the reference with every block rendered from the code as it is."""
    return BLOCK.sub(_rendered, text)


def _rendered(found: re.Match[str]) -> str:
    name, options = found[1], found[2].split()
    subject = _resolve(name)
    parts = _class(subject, options) if inspect.isclass(subject) else _callable(name, subject)
    return f"<!-- api {found[1]}{found[2]} -->\n\n" + "\n\n".join(parts) + "\n\n<!-- /api -->\n"


def _resolve(name: str) -> Any:
    """Return the object of a name: one of `holdfast`, or of a module below it.

    Adapters are read without importing them, since not every environment has the libraries that they need.
    """
    module, _, last = name.rpartition(".")
    if module.startswith("adapters."):
        return _read(PACKAGE / module.replace(".", "/"), last)
    return getattr(importlib.import_module(f"holdfast.{module}".rstrip(".")), last)


# -- code that is not imported -------------------------------------------------------------------------------


class _Names(dict[str, Any]):
    """Values of defaults: any name stands for itself."""

    def __missing__(self, name: str) -> Any:
        return type(name, (), {"__repr__": lambda self: name})()


def _read(room: Path, name: str) -> Any:
    """Return a function or class without its code: its signature and docstring, and those of methods."""
    path = room / "__init__.py" if room.is_dir() else room.with_suffix(".py")
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and any(one.name == name for one in node.names):
            return _read(PACKAGE.parent / str(node.module).replace(".", "/"), name)
        if isinstance(node, ast.FunctionDef) and node.name == name:
            return _without_code(node)
        if isinstance(node, ast.ClassDef) and node.name == name:
            methods = {one.name: _without_code(one) for one in node.body if isinstance(one, ast.FunctionDef)}
            return type(name, (), {**methods, "_tree": node, "__doc__": ast.get_docstring(node)})
    raise KeyError(f"{path} has no {name}")


def _without_code(function: ast.FunctionDef) -> Any:
    function.body = [ast.Expr(ast.Constant(ast.get_docstring(function) or ""))]
    function.decorator_list = []
    future = ast.ImportFrom("__future__", [ast.alias("annotations")], 0)
    module = ast.fix_missing_locations(ast.Module([future, function], []))
    found = _Names()
    exec(compile(module, str(PATH), "exec"), {}, found)
    return found[function.name]


# -- code to Markdown ----------------------------------------------------------------------------------------


def _class(subject: type, options: list[str]) -> Iterator[str]:
    if "-bare" not in options:
        yield _signature(subject.__name__, subject)
    yield from _docstring(subject)
    rows = [row for part in _parts(subject) for row in _attributes(part) if "-attributes" not in options]
    if rows:
        yield "| attribute | meaning |\n|---|---|\n" + "\n".join(
            f"| `{name}` | {text} |" for name, text in rows
        )
    if "-methods" not in options:
        hidden = ("_", *(one.removeprefix("-no_") for one in options if one.startswith("-no_")))
        members = [item for part in _parts(subject) for item in vars(part).items()]
        for name, method in members:
            plain = getattr(method, "__func__", method)
            if vars(subject).get(name, method) is not method:
                continue  # a base has declared it
            if inspect.isfunction(plain) and not name.startswith(hidden):
                yield f"### {name}"
                yield from _callable(name, plain)


def _parts(subject: type) -> list[type]:
    """Return a class, and before it those of its bases that are in its room and have no page of their own."""
    room = subject.__module__.rpartition(".")[0]
    bases = [base for base in subject.__bases__ if base.__module__.startswith(f"{room}.")]
    return [*(base for base in bases if not hasattr(holdfast, base.__name__)), subject]


def _callable(name: str, subject: Any) -> Iterator[str]:
    yield _signature(name.rpartition(".")[2], subject)
    yield from _docstring(subject)


def _signature(name: str, subject: Any) -> str:
    found = inspect.signature(subject)
    parameters = [one for one in found.parameters.values() if one.name not in ("self", "cls")]
    shown = list(_parameters(parameters))
    result = found.return_annotation
    end = "" if inspect.isclass(subject) or result is found.empty else f" -> {result}"
    line = f"{name}({', '.join(shown)}){end}"
    if len(line) > WIDTH:
        line = f"{name}(\n" + "".join(f"    {one},\n" for one in shown) + f"){end}"
    return f"```text\n{re.sub(r'= <[^>]*>', '= ...', line)}\n```"


def _parameters(parameters: list[inspect.Parameter]) -> Iterator[str]:
    has_star = False
    for index, one in enumerate(parameters):
        if one.kind is one.VAR_POSITIONAL:
            has_star = True
        if one.kind is one.KEYWORD_ONLY and not has_star:
            has_star = True
            yield "*"
        default = "" if one.default is one.empty else f" = {one.default!r}"
        note = "" if one.annotation is one.empty else f": {one.annotation}"
        prefix = {one.VAR_POSITIONAL: "*", one.VAR_KEYWORD: "**"}.get(one.kind, "")
        yield prefix + one.name + note + default
        following = parameters[index + 1 : index + 2]
        if one.kind is one.POSITIONAL_ONLY and (not following or following[0].kind is not one.kind):
            yield "/"


def _attributes(subject: type) -> Iterator[tuple[str, str]]:
    """Yield the public attributes and properties that have a docstring, in the order of the source."""
    tree = vars(subject).get("_tree") or ast.parse(textwrap.dedent(inspect.getsource(subject))).body[0]
    assert isinstance(tree, ast.ClassDef)
    bodies = [
        tree.body,
        *(one.body for one in tree.body if isinstance(one, ast.FunctionDef) and one.name == "__init__"),
    ]
    for body in bodies:
        for statement, after in itertools.pairwise(body):
            name = _target(statement)
            text = (
                after.value.value
                if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
                else None
            )
            if name and not name.startswith("_") and isinstance(text, str):
                yield name, _joined(text)
    for one in tree.body:
        if isinstance(one, ast.FunctionDef) and not one.name.startswith("_") and _is_property(one):
            yield one.name, _joined(ast.get_docstring(one) or "")


def _is_property(function: ast.FunctionDef) -> bool:
    return any(isinstance(mark, ast.Name) and mark.id == "property" for mark in function.decorator_list)


def _target(statement: ast.stmt) -> str | None:
    targets = statement.targets if isinstance(statement, ast.Assign) else [getattr(statement, "target", None)]
    target = targets[0]
    if isinstance(target, ast.Name):
        return target.id
    return target.attr if isinstance(target, ast.Attribute) else None


# -- docstrings to Markdown ----------------------------------------------------------------------------------


def _docstring(subject: Any) -> Iterator[str]:
    """Yield the paragraphs and sections of a docstring as Markdown."""
    text = inspect.getdoc(subject) or ""
    kind, lines = "", []
    for line in [*text.splitlines(), "Source:"]:  # the last one ends the section before it
        if found := SECTION.fullmatch(line):
            if any(lines):
                yield _section(kind, lines)
            kind, lines = found[1], [found[2].strip()] if found[2].strip() else []
        else:
            lines.append(line)


def _section(kind: str, lines: list[str]) -> str:
    if not kind:
        return "\n".join(lines).strip()
    body = textwrap.dedent("\n".join(lines)).strip() if lines[0] == "" or lines[0].startswith(" ") else ""
    if kind in ("Args", "Attributes", "Raises"):
        return f"*{TITLES.get(kind, kind)}:*\n\n" + "\n".join(_items(body))
    return f"*{kind}:* " + _joined("\n".join(lines))


def _items(body: str) -> Iterator[str]:
    """Yield the entries `name: text` of a section as list items; deeper lines continue an entry."""
    entry: list[str] = []
    for line in [*body.splitlines(), ""]:
        if entry and not line.startswith(" "):
            name, _, text = _joined("\n".join(entry)).partition(": ")
            yield f"- `{name}`: {text}"
            entry = []
        if line.strip():
            entry.append(line)


def _joined(text: str) -> str:
    """Return a text as one line; paragraphs are joined too."""
    return re.sub(r"\s+", " ", text).strip()


if __name__ == "__main__":
    sys.exit(main())
