"""Metadata that depends on the address of the repository: the links, and the README as the page of it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

_LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s]+)\)")


class RepositoryMetadata(MetadataHookInterface):
    """Hook of hatchling that adds `urls` and `readme`."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Add both to the metadata."""
        repository = self.config["repository"]
        metadata["urls"] = urls(repository)
        page = (Path(self.root) / "README.md").read_text()
        metadata["readme"] = {"content-type": "text/markdown", "text": as_page(page, repository)}


def urls(repository: str) -> dict[str, str]:
    """Return the links of the package; none until the repository has an address."""
    if not repository:
        return {}
    files = f"{repository}/blob/main"
    return {
        "Documentation": f"{files}/docs/index.md",
        "Source": repository,
        "Issues": f"{repository}/issues",
        "Changelog": f"{files}/CHANGELOG.md",
    }


def as_page(text: str, repository: str) -> str:
    """Return the README with links that work elsewhere; without an address, with their text instead."""

    def adapted(link: re.Match[str]) -> str:
        is_picture, label, target = link.groups()
        if ":" in target:
            return link[0]
        if not repository:
            return f"*{label}*" if is_picture else label
        return f"{is_picture}[{label}]({repository}/{'raw' if is_picture else 'blob'}/main/{target})"

    return _LINK.sub(adapted, text)
