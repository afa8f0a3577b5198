"""Entry of all processes that Holdfast starts: runs a module and imports nothing from the current directory.

`python -m MODULE` puts the current directory first on the path for imports, where anybody may have left an
`xxhash.py`, and where a project may have its own `logging.py`. Python has an option against that, `-P`, from
3.11 on. This file does the same in all versions, and leaves no trace in the environment of child processes.
"""

from __future__ import annotations

import os
import sys


def command(module: str, *arguments: str, python: str | None = None) -> list[str]:
    """Return the command line that runs a module without the current directory on its path."""
    return [python or sys.executable, os.path.abspath(__file__), module, *arguments]  # noqa: PTH100 - see `_main`


def _main() -> None:
    # Until the path is clean, nothing is imported but what Python itself has imported at its start.
    folder = os.path.dirname(os.path.abspath(__file__))  # noqa: PTH100, PTH120
    package = os.path.dirname(os.path.dirname(folder))  # noqa: PTH120
    if sys.path[:1] == [folder]:
        del sys.path[0]
    if "" in os.environ.get("PYTHONPATH", "").split(os.pathsep):  # an empty part means the current directory
        here = os.getcwd()  # noqa: PTH109
        sys.path[:] = [path for path in sys.path if path not in ("", here)]
    sys.path.insert(0, package)
    import holdfast  # noqa: F401 - this very copy, whatever others are on the path

    sys.path.append(sys.path.pop(0))
    import runpy

    sys.argv = sys.argv[1:]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    _main()
