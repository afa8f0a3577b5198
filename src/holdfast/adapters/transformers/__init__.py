"""Hugging Face's `Trainer`: after `attach(trainer)`, it saves and resumes with Holdfast."""

from __future__ import annotations

from holdfast.adapters.kit.run import check_versions

check_versions("transformers", {"transformers": (5, 23), "accelerate": (1, 15)})  # whose private methods fit

from holdfast.adapters.transformers.trainer import attach  # noqa: E402 - the check is first

__all__ = ["attach"]
