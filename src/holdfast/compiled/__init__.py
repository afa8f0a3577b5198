"""Compile cache of a run: output of torch.compile that travels with the checkpoints."""

from holdfast.compiled.cache import CLOSE_LIMIT_S, CompiledCode
from holdfast.compiled.startup import download_cache, start_uploads, warn_of_problems
from holdfast.compiled.upload import UploadResult

__all__ = [
    "CLOSE_LIMIT_S",
    "CompiledCode",
    "UploadResult",
    "download_cache",
    "start_uploads",
    "warn_of_problems",
]
