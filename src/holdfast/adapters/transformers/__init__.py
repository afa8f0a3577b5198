"""Hugging Face's `Trainer`: `attach(trainer)` has it save and resume through Holdfast."""

from __future__ import annotations

from holdfast.adapters.transformers.attachment import attach

__all__ = ["attach"]
