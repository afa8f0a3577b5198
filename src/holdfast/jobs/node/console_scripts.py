"""Console scripts of a Python environment, rewritten for another one; pure.

pip and uv write them with the path of their Python in the first line. If that line would be too long for
Linux, or the path contains spaces, they write three lines that are valid for a shell and for Python.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable

_MAX_SHEBANG_BYTES = 127  # Linux cuts a longer line
_FIRST = re.compile(rb"#!\s*(/\S+)[ \t]*(.*)")
_SECOND = re.compile(rb"""'''exec' (?P<python>.+?)(?P<options>(?: -\w+)*) "\$0" "\$@"[ \t]*""")
_RELATIVE = b"$(dirname "


def rewrite(script: bytes, python: str, is_parent: Callable[[str], bool]) -> bytes | None:
    """Return a script of the parent for another Python, or None for a different file.

    Args:
        script: contents of the file.
        python: path of the other Python.
        is_parent: returns True for a path of the parent's Python.
    """
    first, _, rest = script.partition(b"\n")
    match = _FIRST.fullmatch(first.rstrip())
    if match is None:
        return None
    found, options = match.groups()
    if found == b"/bin/sh" and not options:
        second, _, rest = rest.partition(b"\n")
        match = _SECOND.fullmatch(second)
        end, _, rest = rest.partition(b"\n")
        if match is None or end.strip() != b"' '''" or not _is_quoted_parent(match["python"], is_parent):
            return None
        options = match["options"].strip()
    elif not is_parent(found.decode("utf-8", "surrogateescape")):
        return None
    return shebang(python, options) + rest


def shebang(python: str, options: bytes = b"") -> bytes:
    """Return the beginning of a script that a Python runs."""
    path = python.encode("utf-8", "surrogateescape")
    line = b" ".join(filter(None, (b"#!" + path, options)))
    if len(line) < _MAX_SHEBANG_BYTES and not re.search(rb"\s", path):
        return line + b"\n"
    quoted = shlex.quote(python).encode("utf-8", "surrogateescape")
    command = b" ".join(filter(None, (b"'''exec'", quoted, options)))
    return b"#!/bin/sh\n" + command + b' "$0" "$@"\n' + b"' '''\n"


def _is_quoted_parent(word: bytes, is_parent: Callable[[str], bool]) -> bool:
    if _RELATIVE in word:  # uv's relocatable environments: the Python beside the script
        return True
    try:
        words = shlex.split(word.decode("utf-8", "surrogateescape"))
    except ValueError:
        return False
    return len(words) == 1 and is_parent(words[0])
