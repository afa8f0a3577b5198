"""Compile cache of a run: output of torch.compile that travels with the checkpoints."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from holdfast.watch.compiled.cache import CLOSE_LIMIT_S, CompiledCode
    from holdfast.watch.compiled.startup import download_cache, start_uploads, warn_of_problems
    from holdfast.watch.compiled.upload import UploadResult

__all__ = [
    "CLOSE_LIMIT_S",
    "CompiledCode",
    "UploadResult",
    "download_cache",
    "start_uploads",
    "warn_of_problems",
]


def __getattr__(name: str) -> Any:  # `compiled.trust` is read without torch
    if name in ("CLOSE_LIMIT_S", "CompiledCode"):
        from holdfast.watch.compiled import cache as module
    elif name in ("download_cache", "start_uploads", "warn_of_problems"):
        from holdfast.watch.compiled import startup as module
    elif name == "UploadResult":
        from holdfast.watch.compiled import upload as module
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(module, name)
