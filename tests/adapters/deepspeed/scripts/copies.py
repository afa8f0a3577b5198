"""Saves of an engine that are copied while it trains; argv: folder, plan.

The plan is a JSON object. `stage`: of ZeRO; `dtype`: "fp32" or "bf16". A gate holds each copy, so that
everything until the step happens during it. Prints a JSON object.
"""

# DeepSpeed is not in every environment, and has no type information.
# pyright: reportMissingImports=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportIncompatibleMethodOverride=false, reportArgumentType=false, reportUnknownArgumentType=false
# pyright: reportUntypedBaseClass=false, reportUnknownParameterType=false

# Pyright takes the folder of these tests for the package.
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

import json
import os
import sys
import warnings
from typing import Any

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import deepspeed
import pytest
import torch
from deepspeed.runtime.base_optimizer import DeepSpeedOptimizer

from adapters.digest import digest
from holdfast.adapters.deepspeed import attach
from holdfast.errors import NotFound
from stage.training import WAIT_S, CopyGate

WIDTH = 256
DTYPES = {"bf16": {"bf16": {"enabled": True}}, "fp32": {}}


class Model(torch.nn.Module):
    """Layers that are large enough to be copied beside training, and a buffer that changes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(WIDTH, WIDTH), torch.nn.Linear(WIDTH, WIDTH)
        self.register_buffer("seen", torch.zeros(3))

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        return self.second(torch.relu(self.first(batch)))


def make(plan: dict[str, Any]) -> Any:
    """Return an engine that is not attached, after two steps."""
    torch.manual_seed(0)
    model = Model()
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_clipping": 1.0,
        "gradient_accumulation_steps": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.05, "torch_adam": True}},
        "zero_optimization": {"stage": plan["stage"]},
        **DTYPES[plan["dtype"]],
    }
    engine = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0]
    for _ in range(2):
        pass_batches(engine)
        engine.step()
    return engine


def pass_batches(engine: Any) -> None:
    """Accumulate the gradients of a step: all of it except the update."""
    dtype = next(engine.module.parameters()).dtype
    for number in range(2):
        engine.backward(engine(torch.randn(4, WIDTH, dtype=dtype)).float().square().mean())
        if number == 0:
            engine.step()


def save(engine: Any, folder: str, write: Any = None, client: Any = None) -> tuple[bool, str]:
    """Save, write something and train a step. Return whether the copy was held, and the state's digest.

    `write` is called with the engine once the save has returned and its copy has begun.
    """
    expected = digest_of(engine)
    with pytest.MonkeyPatch.context() as patch:
        gate = CopyGate(patch)
        gate.open_when_stepping([inner(engine)])
        options = {} if client is None else {"client_state": client}
        engine.save_checkpoint(folder, "held", **options)
        is_held = gate.reached.wait(WAIT_S) and not gate.opened.is_set()
        if write is not None:
            write(engine)
        pass_batches(engine)
        is_held = is_held and not gate.opened.is_set()
        engine.step()
        assert gate.opened.is_set()
    return is_held, expected


def load(engine: Any, folder: str) -> str:
    """Load the held save into a new engine, and return the digest of its state, or the error."""
    try:
        attach(engine).load_checkpoint(folder, "held")
    except NotFound as error:
        return type(error).__name__
    return digest_of(engine)


def inner(engine: Any) -> Any:
    """Return the optimizer of torch."""
    optimizer = engine.optimizer
    return optimizer.optimizer if isinstance(optimizer, DeepSpeedOptimizer) else optimizer


def digest_of(engine: Any) -> str:
    """Return a digest of all that a checkpoint contains of this rank's tensors."""
    state = {key: one for key, one in engine.optimizer.state_dict().items() if key != "loss_scaler"}
    return digest([engine.module_state_dict(), state])


def exchange_weights(engine: Any) -> None:
    """Write to the module's weights, as averaging of weights does for an evaluation."""
    parameters = list(engine.module.parameters())
    with deepspeed.zero.GatheredParameters(parameters, modifier_rank=0), torch.no_grad():
        for one in parameters:
            one.data.mul_(0.5)


def scale_moments(engine: Any) -> None:
    """Write to the memory of the optimizer on the last rank."""
    if engine.global_rank == torch.distributed.get_world_size() - 1:
        for slots in inner(engine).state.values():
            slots["exp_avg"].data.mul_(2)


def main(folder: str, plan: dict[str, Any]) -> None:
    """Save three times, each in a folder of its own."""
    deepspeed.ops.__compatible_ops__.clear()  # else it compiles its own all-reduce first
    deepspeed.init_distributed("gloo")
    found = {}
    for name, write in (("untouched", None), ("exchanged", exchange_weights)):
        engine = attach(make(plan))
        is_held, expected = save(engine, f"{folder}/{name}", write)
        engine.holdfast_session.wait()
        found[name] = [is_held, load(make(plan), f"{folder}/{name}") == expected]
    for name, client in (("repeated", None), ("missing", {"step": 2})):
        engine = attach(make(plan))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            is_held, _ = save(engine, f"{folder}/{name}", scale_moments, client)
        now = digest_of(engine)
        words = [str(one.message) for one in caught if "checkpoint held was dropped" in str(one.message)]
        engine.save_checkpoint(f"{folder}/{name}", "next")
        engine.holdfast_session.wait()
        loaded = load(make(plan), f"{folder}/{name}")
        found[name] = [is_held, "equal" if loaded == now else loaded, words]
    sys.stdout.write(json.dumps(found) + "\n")
    sys.stdout.flush()
    torch.distributed.barrier()


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
