"""Public names of packages that import each when it is first used: their stubs list them."""

from __future__ import annotations


def read_stub(file: str) -> dict[str, str]:
    """Return the module of each public name of a package, from the stub beside its `__init__.py`."""
    with open(f"{file}i", encoding="utf-8") as stub:  # noqa: PTH123 - pathlib takes long to import
        imports = [line.split() for line in stub if line.startswith("from ")]
    return {words[3]: words[1] for words in imports}
