"""Files of variables, one NAME=VALUE per line, as `--env-file` reads them; pure.

Source: python-dotenv, with which SkyPilot reads them: quotes, escapes, comments and `${NAME}` mean the same.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from holdfast.errors import InvalidInput

_SPACE = r"[^\S\n]*"
_ENTRY = re.compile(
    rf"{_SPACE}(?:export{_SPACE}(?<=\s))?(?P<name>[A-Za-z_]\w*){_SPACE}="
    rf"(?:{_SPACE}'(?P<single>(?:[^'\\]|\\.)*)'|{_SPACE}\"(?P<double>(?:[^\"\\]|\\.)*)\""
    rf"|(?!{_SPACE}['\"])(?P<bare>[^\n]*))"
    rf"{_SPACE}(?:#[^\n]*)?(?:\n|\Z)",
    re.A | re.S,
)
_NOTHING = re.compile(rf"{_SPACE}(?:#[^\n]*)?(?:\n|\Z)")
_COMMENT = re.compile(r"\s+#.*")
_REFERENCE = re.compile(r"\$\{(?P<name>[^}:]*)(?::-(?P<default>[^}]*))?\}")
_SINGLE_ESCAPE = re.compile(r"\\([\\'])")
_DOUBLE_ESCAPE = re.compile(r"\\([\\'\"abfnrtv])")
_LETTERS = {"a": "\a", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t", "v": "\v"}


def parse_env_file(text: str, name: str, known: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of a file."""
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    found: dict[str, str] = {}
    at = 0
    while at < len(text):
        where = f"{name}:{text.count(chr(10), 0, at) + 1}"
        if (nothing := _NOTHING.match(text, at)) is not None:
            at = nothing.end()
            continue
        entry = _ENTRY.match(text, at)
        if entry is None:
            # The line may contain a secret, so it is not shown.
            raise InvalidInput(f"{where}: expected NAME=VALUE. Nothing was started.")
        found[entry["name"]] = _filled(_value(entry), {**known, **found}, where)
        at = entry.end()
    return found


def _value(entry: re.Match[str]) -> str:
    if entry["single"] is not None:
        return _SINGLE_ESCAPE.sub(r"\1", entry["single"])
    if entry["double"] is not None:
        return _DOUBLE_ESCAPE.sub(lambda found: _LETTERS.get(found[1], found[1]), entry["double"])
    return _COMMENT.sub("", entry["bare"] or "").strip()


def _filled(value: str, known: Mapping[str, str], where: str) -> str:
    def replaced(found: re.Match[str]) -> str:
        value = known.get(found["name"], found["default"])
        if value is None:
            raise InvalidInput(
                f"{where}: ${{{found['name']}}} has no value, neither above nor in this environment. Nothing "
                "was started."
            )
        return value

    return _REFERENCE.sub(replaced, value)
