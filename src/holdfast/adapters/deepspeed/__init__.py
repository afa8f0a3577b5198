"""DeepSpeed: `attach(engine)` has its engine save and resume through Holdfast, with ZeRO 0 to 3."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from holdfast.errors import Unsupported

_OLDEST = (0, 19)
"""Oldest version whose private methods fit."""


def _check_version() -> None:
    """Check that DeepSpeed is installed, in a version that the adapter supports.

    Raises:
        Unsupported: it is missing, or older.
    """
    try:
        found = version("deepspeed")
    except PackageNotFoundError:
        found = None
    if found is None or tuple(int(part) for part in found.split(".")[:2]) < _OLDEST:
        state = "it is not installed" if found is None else f"{found} is installed"
        raise Unsupported(
            f"holdfast.adapters.deepspeed needs deepspeed {'.'.join(map(str, _OLDEST))} or later, and "
            f"{state}. Run: pip install 'torch-holdfast[deepspeed]'."
        )


_check_version()

from holdfast.adapters.deepspeed.attachment import attach  # noqa: E402 - the check is first

__all__ = ["attach"]
