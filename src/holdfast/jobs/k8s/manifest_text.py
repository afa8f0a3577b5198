"""Text of a manifest: YAML that 1.1 and 1.2 read alike, and `$` as Kubernetes replaces it; pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

import yaml
from typing_extensions import override

# Readers differ about words such as y, on and 1e3. So only words that cannot be anything else are not quoted.
_PLAIN = re.compile(r"[A-Za-z/][\w./-]*", re.A)
_WORDS = frozenset(("y", "n", "yes", "no", "on", "off", "true", "false", "null", "nan", "inf"))
_OTHER_BREAKS = re.compile("[\r\x85\u2028\u2029]")  # line breaks in YAML 1.1 only
_NEVER_FOLDED = 10**9
_REPLACED = re.compile(r"\$(?=[$(])")


class _Dumper(yaml.SafeDumper):
    """Dumper without anchors that quotes text unless it cannot be anything else."""

    @override
    def ignore_aliases(self, data: Any) -> bool:
        return True


def _text(dumper: yaml.SafeDumper, text: str) -> Any:
    is_plain = _PLAIN.fullmatch(text) and text.lower() not in _WORDS
    is_block = "\n" in text and not _OTHER_BREAKS.search(text)
    style = "|" if is_block else None if is_plain else '"'
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _text)


def to_manifest(document: Mapping[str, Any], comments: Iterable[str]) -> str:
    """Return a manifest that begins with comments."""
    body = yaml.dump(dict(document), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=_NEVER_FOLDED)
    return "".join(f"# {line}\n" for line in comments) + body


def escape(text: str) -> str:
    """Return text that Kubernetes turns back into `text`: it replaces `$(NAME)`, and `$$` by `$`."""
    return _REPLACED.sub("$$", text)


def reference(name: str) -> str:
    """Return text that Kubernetes replaces by the value of an environment variable."""
    return f"$({name})"
