"""Lightning's classes, from the package that the script uses: `lightning` or `pytorch_lightning`."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from typing import Any

from holdfast.errors import Unsupported

_NAMES = ("lightning.pytorch", "pytorch_lightning")


class _Missing:
    """Placeholder for a class of Lightning if it is not installed."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        raise Unsupported(
            "Neither lightning nor pytorch_lightning is installed. Install one: "
            "pip install 'torch-holdfast[lightning]'."
        )


_present = [name for name in _NAMES if importlib.util.find_spec(name.partition(".")[0]) is not None]
# The package that is already imported, else the installed one. Their classes differ.
_package = next((name for name in _present if name in sys.modules), next(iter(_present), None))


def _find(part: str, name: str) -> Any:
    """Return a class of the chosen package."""
    if _package is None:
        return _Missing
    return getattr(importlib.import_module(f"{_package}.{part}"), name)


EPOCH_CALLBACKS: Any = tuple(
    _find("callbacks", name) for name in ("GradientAccumulationScheduler", "StochasticWeightAveraging")
)
"""Classes of callbacks that act when an epoch begins, which Lightning skips at a resume within it."""
DataLoaderIterDataFetcher: Any = _find("loops.fetchers", "_DataLoaderIterDataFetcher")
ModelCheckpoint: Any = _find("callbacks", "ModelCheckpoint")
TorchCheckpointIO: Any = _find("plugins.io", "TorchCheckpointIO")
CombinedLoader: Any = _find("utilities", "CombinedLoader")
SIGTERMException: Any = _find("utilities.exceptions", "SIGTERMException")
