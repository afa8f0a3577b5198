"""Labels of nodes for models of GPUs; pure.

Source: the accelerator types of Google Kubernetes Engine, and the product names of NVIDIA's GPU feature
discovery, which are those of nvidia-smi with dashes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

_SKYPILOT = "skypilot.co/accelerator"
_GOOGLE = "cloud.google.com/gke-accelerator"
_NVIDIA = "nvidia.com/gpu.product"

_GOOGLE_TYPES: Mapping[str, tuple[str, ...]] = {
    "T4": ("nvidia-tesla-t4",),
    "P4": ("nvidia-tesla-p4",),
    "P100": ("nvidia-tesla-p100",),
    "V100": ("nvidia-tesla-v100",),
    "L4": ("nvidia-l4",),
    "A100": ("nvidia-tesla-a100",),
    "A100-80GB": ("nvidia-a100-80gb",),
    "H100": ("nvidia-h100-80gb", "nvidia-h100-mega-80gb"),
    "H200": ("nvidia-h200-141gb",),
    "B200": ("nvidia-b200",),
}
_NVIDIA_PRODUCTS: Mapping[str, tuple[str, ...]] = {
    "T4": ("Tesla-T4",),
    "V100": ("Tesla-V100-SXM2-16GB", "Tesla-V100-PCIE-16GB"),
    "V100-32GB": ("Tesla-V100-SXM2-32GB", "Tesla-V100-PCIE-32GB"),
    "L4": ("NVIDIA-L4",),
    "L40S": ("NVIDIA-L40S",),
    "A10": ("NVIDIA-A10",),
    "A10G": ("NVIDIA-A10G",),
    "A100": ("NVIDIA-A100-SXM4-40GB", "NVIDIA-A100-PCIE-40GB"),
    "A100-80GB": ("NVIDIA-A100-SXM4-80GB", "NVIDIA-A100-80GB-PCIe"),
    "H100": ("NVIDIA-H100-80GB-HBM3", "NVIDIA-H100-PCIe", "NVIDIA-H100-NVL"),
    "H200": ("NVIDIA-H200",),
    "B200": ("NVIDIA-B200",),
}


def node_affinity(models: Iterable[str]) -> dict[str, Any]:
    """Return the affinity for nodes with one of these models, by any label."""
    names = list(models)
    values = {
        _SKYPILOT: [name.lower() for name in names],
        _GOOGLE: [one for name in names for one in _GOOGLE_TYPES.get(name.upper(), ())],
        _NVIDIA: [one for name in names for one in _NVIDIA_PRODUCTS.get(name.upper(), ())],
    }
    # Terms are alternatives: a cluster has one of these labels, and usually not the others.
    terms = [
        {"matchExpressions": [{"key": label, "operator": "In", "values": found}]}
        for label, found in values.items()
        if found
    ]
    wanted = {"nodeSelectorTerms": terms}
    return {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": wanted}}
