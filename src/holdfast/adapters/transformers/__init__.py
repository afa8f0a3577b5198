"""Hugging Face's `Trainer`: `attach(trainer)` has it save and resume through Holdfast."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from holdfast.errors import Unsupported

_VERSIONS = {"transformers": (5, 23), "accelerate": (1, 15)}  # the oldest whose private methods fit


def _check_versions() -> None:
    """Check that Transformers and Accelerate are installed, in versions that the adapter supports.

    Raises:
        Unsupported: one is missing, or older.
    """
    for name, oldest in _VERSIONS.items():
        needed = f"{name} {'.'.join(map(str, oldest))} or later"
        try:
            found = version(name)
        except PackageNotFoundError:
            found = None
        if found is None or tuple(int(part) for part in found.split(".")[:2]) < oldest:
            state = "it is not installed" if found is None else f"{found} is installed"
            raise Unsupported(
                f"holdfast.adapters.transformers needs {needed}, and {state}. Run: "
                "pip install 'torch-holdfast[transformers]'."
            )


_check_versions()

from holdfast.adapters.transformers.attachment import attach  # noqa: E402 - the check is first

__all__ = ["attach"]
