"""DeepSpeed: after `attach(engine)`, an engine saves and resumes with Holdfast, with ZeRO 0 to 3."""

from __future__ import annotations

from holdfast.adapters.kit.run import check_versions

check_versions("deepspeed", {"deepspeed": (0, 19)})  # the oldest whose private methods fit

from holdfast.adapters.deepspeed.engine import attach  # noqa: E402 - the check is first

__all__ = ["attach"]
