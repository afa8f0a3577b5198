"""Hash of nested tensors and values, for scripts that print the end of a run."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import torch


def digest(value: Any) -> str:
    """Return a hash of nested tensors and values."""
    if isinstance(value, torch.Tensor):
        whole: Any = value
        whole = whole.full_tensor() if hasattr(whole, "full_tensor") else whole
        return hashlib.sha256(
            whole.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        ).hexdigest()
    if isinstance(value, dict):
        pairs = sorted((str(key), digest(item)) for key, item in value.items())
        return hashlib.sha256(json.dumps(pairs).encode()).hexdigest()
    if isinstance(value, (list, tuple)):
        return hashlib.sha256(json.dumps([digest(item) for item in value]).encode()).hexdigest()
    return repr(value)
