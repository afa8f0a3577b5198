"""Hugging Face Accelerate: after `attach(accelerator)`, `save_state` and `load_state` use Holdfast."""

from __future__ import annotations

from holdfast.adapters.kit.run import check_versions

check_versions("accelerate", {"accelerate": (1, 15)})  # the oldest whose private names fit

from holdfast.adapters.accelerate.accelerator import attach, is_preempted  # noqa: E402 - the check is first

__all__ = ["attach", "is_preempted"]
