"""From what a user writes for sources of notices, or from the machine's own make, to those sources."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from holdfast.errors import InvalidInput
from holdfast.notice import aws, azure, gcp
from holdfast.notice.cloud import Cloud
from holdfast.surroundings import NOTICES

_MAKE = Path("/sys/class/dmi/id")
_AZURE_TAG = "7783-7084-3265-9085-8269-3286-77"  # the same on every machine of that cloud
NAMES = ("auto", "none", "aws", "gcp", "azure", "file:PATH")
"""What a source may be called. `aws=URL` asks another address than the cloud's own, for tests and proxies."""


@dataclass(frozen=True, slots=True)
class Sources:
    """Where notices come from, beside signals."""

    clouds: tuple[Cloud, ...] = ()
    files: tuple[Path, ...] = ()


def read_sources(value: str | Iterable[str] | None, *, make: Path = _MAKE) -> Sources:
    """The sources that a user names.

    Args:
        value: `aws`, `gcp`, `azure`, `file:PATH`, `auto` (the cloud that this machine is of, if any) or
            `none`; several as a list, or with commas. By default what HOLDFAST_NOTICES says, else `auto`.
        make: folder in which the kernel tells who made the machine.

    Raises:
        InvalidInput: there is no such source.
    """
    if value is None:
        value = os.environ.get(NOTICES, "auto")
    words = value.split(",") if isinstance(value, str) else list(value)
    clouds: list[Cloud] = []
    files: list[Path] = []
    for word in (word.strip() for word in words):
        name, _, base = word.partition("=")
        if word.startswith("file:"):
            files.append(Path(word.removeprefix("file:")).absolute())
        elif name == "auto":
            clouds += _clouds(_own_cloud(make), "")
        elif name in ("aws", "gcp", "azure"):
            clouds += _clouds(name, base)
        elif name not in ("none", ""):
            raise InvalidInput(
                f"There is no source of notices called {word!r}. Expected: {', '.join(NAMES)}; several with "
                f"commas. It stands in notices= or in {NOTICES}."
            )
    return Sources(tuple(clouds), tuple(files))


def _clouds(name: str, base: str) -> list[Cloud]:
    if name == "aws":
        return [aws.Aws(base or aws.BASE)]
    if name == "gcp":
        return [gcp.GcpPreemption(base or gcp.BASE), gcp.GcpMaintenance(base or gcp.BASE)]
    return [azure.Azure(base or azure.BASE)] if name == "azure" else []


def _own_cloud(make: Path) -> str:
    """The cloud that this machine is of; empty if it is none that we know."""
    if _read(make / "sys_vendor") == "Amazon EC2":
        return "aws"
    if _read(make / "product_name") == "Google Compute Engine":
        return "gcp"
    return "azure" if _read(make / "chassis_asset_tag") == _AZURE_TAG else ""


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""
