"""Escaping of `$`, because Kubernetes replaces `$(NAME)` in commands and environment variables; pure."""

from __future__ import annotations

import re

_REPLACED = re.compile(r"\$(?=[$(])")


def escape(text: str) -> str:
    """Return text that Kubernetes turns back into `text`: it replaces `$(NAME)`, and `$$` by `$`."""
    return _REPLACED.sub("$$", text)


def reference(name: str) -> str:
    """Return text that Kubernetes replaces by the value of an environment variable."""
    return f"$({name})"
