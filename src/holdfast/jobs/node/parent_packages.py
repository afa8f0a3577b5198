"""Packages of the parent environment, imported after those of the job. Copied into the job's environment.

So this file imports only what Python itself has, and as little as possible.
"""

from __future__ import annotations

import site
import sys

TYPE_CHECKING = False  # as in `typing`, whose import would delay each start of Python
if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.abc import MetaPathFinder
    from importlib.machinery import ModuleSpec
    from types import ModuleType


def add_parent(folder: str | None) -> None:
    """Append the packages of the parent environment to the path for imports.

    A `.pth` file, the last one by its name, calls this when Python starts. pip calls it again before it
    builds a package, to find the entries that it removes. Without a folder, Python itself adds them later.
    """
    finders = sys.meta_path
    names = [getattr(finder, "__name__", "") for finder in finders]
    position = names.index("PathFinder")
    late = [finder for finder in finders[position + 1 :] if hasattr(finder, "find_spec")]
    if late and not any(isinstance(finder, EditableFirst) for finder in finders):
        finders.insert(position, EditableFirst(late, finders[position], sys.path[-1]))  # type: ignore[arg-type]
    if folder is not None:
        site.addsitedir(folder, set())


class EditableFirst:
    """Finder of the job's editable packages, before the parent's packages of the same names.

    setuptools adds its finders of editable packages behind that of the path for imports, which here includes
    the parent's packages, after the `last` entry of the job's own.
    """

    def __init__(self, editable: list[MetaPathFinder], by_path: MetaPathFinder, last: str) -> None:
        self._editable = editable
        self._by_path = by_path
        self._last = last

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of an editable package, or None for other finders to decide."""
        if path is not None:
            return None
        specs = (finder.find_spec(name, None, target) for finder in self._editable)
        editable = next((spec for spec in specs if spec is not None), None)
        if editable is None:
            return None
        end = sys.path.index(self._last) + 1 if self._last in sys.path else len(sys.path)
        regular = self._by_path.find_spec(name, sys.path[:end], target)
        return editable if regular is None or regular.loader is None else None
