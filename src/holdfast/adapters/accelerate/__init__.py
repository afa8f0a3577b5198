"""Hugging Face Accelerate: `attach(accelerator)` has `save_state` and `load_state` go through Holdfast."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from holdfast.errors import Unsupported

_OLDEST = (1, 15)  # the oldest whose private names fit


def _check_version() -> None:
    """Check that Accelerate is installed, in a version that the adapter supports.

    Raises:
        Unsupported: it is missing, or older.
    """
    needed = f"accelerate {'.'.join(map(str, _OLDEST))} or later"
    try:
        found = version("accelerate")
    except PackageNotFoundError:
        found = None
    if found is None or tuple(int(part) for part in found.split(".")[:2]) < _OLDEST:
        state = "it is not installed" if found is None else f"{found} is installed"
        raise Unsupported(
            f"holdfast.adapters.accelerate needs {needed}, and {state}. Run: "
            "pip install 'torch-holdfast[accelerate]'."
        )


_check_version()

from holdfast.adapters.accelerate.attachment import attach, is_preempted  # noqa: E402 - the check is first

__all__ = ["attach", "is_preempted"]
