"""Checks that an engine can save through Holdfast, with the fix where it cannot."""

# DeepSpeed has no type information.
# pyright: reportMissingImports=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportIncompatibleMethodOverride=false, reportArgumentType=false, reportUnknownArgumentType=false
# pyright: reportUntypedBaseClass=false, reportUnknownParameterType=false

from __future__ import annotations

from typing import Any

from deepspeed.runtime.checkpoint_engine import TorchCheckpointEngine
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.pipe.engine import PipelineEngine

from holdfast.errors import InvalidInput, Unsupported


def check_engine(engine: Any) -> None:
    """Check that an object is an engine that Holdfast can save.

    Raises:
        InvalidInput: it is not an engine, or its configuration chooses another writer.
        Unsupported: its state is in places that Holdfast does not save.
    """
    if not isinstance(engine, DeepSpeedEngine):
        hint = ""
        if isinstance(engine, tuple):
            hint = " deepspeed.initialize() returns a tuple, whose first element is the engine."
        raise InvalidInput(
            f"attach() needs the engine of deepspeed.initialize(), not a {type(engine).__name__}.{hint} "
            "Nothing was changed."
        )
    if isinstance(engine, PipelineEngine):
        raise Unsupported(
            "Pipeline engines are not supported: they write their layers without the engine's checkpoint "
            "names. The engine was not changed. Leave attach() out, and save as DeepSpeed does."
        )
    if engine.zero_nvme_offload_optimizer() or _keeps_parameters_on_nvme(engine):
        raise Unsupported(
            "The engine keeps state in files of its own (offload to NVMe), which Holdfast does not save. "
            'The engine was not changed. Offload to "cpu", or leave attach() out.'
        )
    if type(engine.checkpoint_engine) is not TorchCheckpointEngine:
        raise InvalidInput(
            f"The configuration of DeepSpeed chooses {type(engine.checkpoint_engine).__name__} to write "
            'checkpoints. The engine was not changed. Remove "checkpoint": {"writer": ...} and '
            '"datastates_ckpt" from the configuration: Holdfast already writes in the background.'
        )


def _keeps_parameters_on_nvme(engine: Any) -> bool:
    offload = engine.zero_offload_param()
    return offload is not None and str(getattr(offload.device, "value", offload.device)) == "nvme"
