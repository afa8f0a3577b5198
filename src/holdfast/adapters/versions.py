"""Check of the packages that an adapter needs."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version

from holdfast.errors import Unsupported


def check_versions(extra: str, oldest: Mapping[str, tuple[int, int]]) -> None:
    """Check that packages are installed, in versions that an adapter supports.

    Args:
        extra: name of the adapter, and of the extra that installs them.
        oldest: the oldest version of each package, such as `{"deepspeed": (0, 19)}`.

    Raises:
        Unsupported: one is missing, or older.
    """
    for name, least in oldest.items():
        try:
            found = version(name)
        except PackageNotFoundError:
            found = None
        if found is None or tuple(int(part) for part in found.split(".")[:2]) < least:
            state = "it is not installed" if found is None else f"{found} is installed"
            raise Unsupported(
                f"holdfast.adapters.{extra} needs {name} {'.'.join(map(str, least))} or later, and {state}. "
                f"Run: pip install 'torch-holdfast[{extra}]'."
            )
