"""The ways of saving that are compared, by name."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .contract import Peer

PEERS = {
    "holdfast": ("holdfast", "Holdfast"),
    "torch-save": ("torchsave", "TorchSave"),
    "safetensors": ("safetensors", "Safetensors"),
    "dcp": ("dcp", "Dcp"),
    "dcp-thread": ("dcp", "DcpThread"),
    "dcp-staged": ("dcp", "DcpStaged"),
    "dcp-process": ("dcp", "DcpProcess"),
    "torch-checkpointing": ("metacheckpointing", "TorchCheckpointing"),
    "torch-checkpointing-async": ("metacheckpointing", "TorchCheckpointingAsync"),
}
"""Name: (module in this folder, class)."""

OTHERS = {
    "moonclip": ("moonclip", "Moonclip"),
    "moonclip-bf16": ("moonclip", "MoonclipBf16"),
    "ravex": ("ravex", "Ravex"),
    "lm-resiliency": ("lmresiliency", "LmResiliency"),
    "torchsnapshot": ("torchsnapshot", "TorchSnapshot"),
    "dlrover": ("dlrover", "DlRover"),
    "nvrx-fork": ("nvrx", "NvrxFork"),
    "nvrx-persistent": ("nvrx", "NvrxPersistent"),
    "orbax": ("orbax", "Orbax"),
    "lightning": ("lightning", "Lightning"),
    "deepspeed-torch": ("deepspeed", "DeepSpeedTorch"),
    "deepspeed-fast": ("deepspeed", "DeepSpeedFast"),
    "deepspeed-decoupled": ("deepspeed", "DeepSpeedDecoupled"),
}
"""The same for engines of which most environments have none; `run.py --others` measures them."""


def find(name: str) -> type[Peer]:
    """The class of that name; imports only its own file."""
    module, cls = (PEERS | OTHERS)[name]
    return getattr(importlib.import_module(f"{__name__}.{module}"), cls)
