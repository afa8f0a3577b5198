"""Scenario with engines of DeepSpeed; argv: its name, a folder, its arguments. Prints a JSON object."""

# DeepSpeed is not in every environment, and has no type information.
# pyright: reportMissingImports=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportIncompatibleMethodOverride=false, reportArgumentType=false, reportUnknownArgumentType=false
# pyright: reportUntypedBaseClass=false, reportUnknownParameterType=false

# Pyright takes the folder of these tests for the package.
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

import gc
import json
import os
import sys
import warnings
from pathlib import Path
from typing import Any

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import deepspeed
import pytest
import torch
from deepspeed.runtime.base_optimizer import DeepSpeedOptimizer

import holdfast
from adapters.damage import flip
from adapters.digest import digest
from holdfast import Checkpointer
from holdfast.adapters.deepspeed import attach
from holdfast.checkpoint.exchange import export_checkpoint
from holdfast.errors import HoldfastError, NotFound
from stage.training import WAIT_S, CopyGate

WIDTH = 256
"""Size of layers that are large enough to be copied beside training."""
DTYPES: dict[str, Any] = {"bf16": {"bf16": {"enabled": True}}, "fp32": {}}


def make(stage: int = 1, model: Any = None, **changes: Any) -> Any:
    """Return an engine of a model, by default a small one, with changes of the configuration."""
    torch.manual_seed(0)
    if model is None:
        model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.1, "torch_adam": True}},
        "zero_optimization": {"stage": stage},
        **changes,
    }
    return deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0]


def taken_over(folder: str, stage: int, dtype: str) -> dict[str, Any]:
    """Put a module and an optimizer that DeepSpeed has taken over into the state of a Checkpointer."""
    model = torch.nn.Linear(8, 1)
    optimizer = torch.optim.AdamW(model.parameters())
    other = torch.nn.Linear(8, 1)
    earlier = Checkpointer(Path(folder) / "earlier", {"optimizer": optimizer})
    config = {"train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": stage}, **DTYPES[dtype]}
    engine = deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]
    found = {"earlier": refusal(lambda: earlier.save(1))}
    states = {
        "model": {"model": engine.module},
        "optimizer": {"optimizer": optimizer},
        "others": {"model": other, "optimizer": torch.optim.AdamW(other.parameters())},
        "tensor": {"optimizer": torch.optim.AdamW([torch.zeros(3, requires_grad=True)])},
    }
    for name, state in states.items():
        own, live = Path(folder) / name, Path(folder) / f"live {name}"
        found[name] = refusal(lambda live=live, state=state: Checkpointer(live, state))
        found[f"save of {name}"] = refusal(lambda own=own, state=state: Checkpointer(own).save(1, state))
    return found


def train(engine: Any, steps: int = 1) -> None:
    """Train some steps."""
    for _ in range(steps):
        engine.backward(engine(torch.randn(4, 8)).square().mean())
        engine.step()


def weight(engine: Any) -> str:
    """Return a number that depends on all weights."""
    return float(sum(one.detach().double().sum() for one in engine.module.parameters())).hex()


def refusal(call: Any) -> str:
    """Return the message of the error that a call raises."""
    try:
        call()
    except HoldfastError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def tags(folder: str) -> dict[str, Any]:
    """Save under names, twice in one step, and again under the same name."""
    engine = attach(make(), keep=None)
    weights = {}
    for tag, is_latest in (("first", True), ("best", False), ("first", True), ("side", False)):
        train(engine)
        weights[tag] = weight(engine)
        engine.save_checkpoint(folder, tag, {"made": tag}, save_latest=is_latest)
    engine.save_checkpoint(folder, "same", {"made": "same"}, save_latest=False)
    found = {}
    for tag in (None, "best", "side", "same", "missing"):
        other = attach(make())
        try:
            path, client = other.load_checkpoint(folder, tag)
        except NotFound as error:
            found[str(tag)] = str(error)
            continue
        made = client["made"]
        expected = weights["side" if tag == "same" else made]
        found[str(tag)] = [made, Path(path).parent.name, weight(other) == expected]
    found["client"] = sorted(client)
    return found


def refusals(folder: str) -> dict[str, Any]:
    """Attach and save in ways that are refused."""
    engine, found = make(), {}
    found["tuple"] = refusal(lambda: attach((engine, None)))
    found["every"] = refusal(lambda: attach(engine, every=5))
    found["local"] = refusal(lambda: attach(engine, local="near"))
    found["client_state"] = refusal(lambda: attach(engine, client_state={"step": 1}))
    sharded = make(3)
    for name, state in (
        ("state", {"engine": engine}),
        ("optimizer", {"optimizer": engine.optimizer}),
        ("nested", {"a": [{"engine": engine}]}),
        ("module", {"model": sharded.module}),
    ):
        own = Path(folder) / name
        found[name] = refusal(lambda own=own, state=state: Checkpointer(own).save(1, state))
        live = Path(folder) / f"live {name}"
        found[f"live {name}"] = refusal(lambda live=live, state=state: Checkpointer(live, state).save(1))
    other = make()
    other.checkpoint_engine.__class__ = type("OtherEngine", (type(other.checkpoint_engine),), {})
    found["writer"] = refusal(lambda: attach(other))
    attach(engine)
    found["twice"] = refusal(lambda: attach(engine))
    train(engine)
    found["value"] = refusal(lambda: engine.save_checkpoint(folder, client_state={"f": {"g": print}}))
    engine.save_checkpoint(folder)
    engine.holdfast_session.wait()
    found["options"] = refusal(lambda: attach(make(), keep=2).save_checkpoint(folder))
    return found


def fresh(folder: str) -> dict[str, Any]:
    """Save without loading to a folder that holds a run."""
    engine = attach(make())
    train(engine)
    return {"refused": refusal(lambda: engine.save_checkpoint(folder)), "steps": steps(folder)}


def steps(folder: str) -> list[int]:
    """Return the steps in the home of a folder."""
    return Checkpointer(Path(folder) / "holdfast", {}, quiet=True).all_steps()


def stock(folder: str) -> dict[str, Any]:
    """Continue a folder that DeepSpeed has written, then load the newest again."""
    engine = make()
    train(engine, 3)
    engine.save_checkpoint(folder)
    expected = weight(engine)
    attached = attach(make())
    path, _ = attached.load_checkpoint(folder)
    found: dict[str, Any] = {"path": Path(path).parent.name, "is_equal": weight(attached) == expected}
    train(attached, 2)
    attached.save_checkpoint(folder)
    attached.holdfast_session.wait()
    again = attach(make())
    found["again"] = Path(again.load_checkpoint(folder)[0]).parent.name
    found["is_equal_again"] = weight(again) == weight(attached)
    found["old"] = Path(attach(make()).load_checkpoint(folder, "global_step3")[0]).parent.name
    engine = make()
    train(engine, 9)
    engine.save_checkpoint(folder)  # stock again
    found["newest"] = Path(attach(make()).load_checkpoint(folder)[0]).parent.name
    return found


def damage(folder: str) -> dict[str, Any]:
    """Load where the newest checkpoint is damaged."""
    engine, weights = attach(make()), {}
    for _ in range(3):
        train(engine)
        engine.save_checkpoint(folder)
        weights[engine.global_steps] = weight(engine)
    engine.holdfast_session.wait()
    file = next((Path(folder) / "holdfast").glob("step-00000003/*.safetensors"))
    flip(file, -20)
    other = attach(make())
    path, _ = other.load_checkpoint(folder)
    found = {"path": Path(path).parent.name, "is_equal": weight(other) == weights[2]}
    found["explicit"] = refusal(lambda: attach(make()).load_checkpoint(folder, "global_step3"))
    return found


def export(folder: str, stage: int) -> dict[str, Any]:
    """Export a checkpoint, and load it with a stock engine."""
    engine = attach(make(stage))
    train(engine, 2)
    engine.save_checkpoint(folder, client_state={"epoch": 7})
    engine.holdfast_session.wait()
    target = str(Path(folder) / "stock")
    export_checkpoint(holdfast.open(Path(folder) / "holdfast"), target, kind="deepspeed")
    other = make(stage)
    path, client = other.load_checkpoint(target)
    torch.manual_seed(9)
    train(engine, 2)
    torch.manual_seed(9)
    train(other, 2)
    is_equal = full_weights(engine) == full_weights(other)
    return {"epoch": client["epoch"], "path": Path(path).parent.name, "is_equal": is_equal}


def weights_only(folder: str, stage: int) -> dict[str, Any]:
    """Load a model with tied and frozen weights and a buffer, without the optimizer's state."""

    def begin(seed: int) -> Any:
        torch.manual_seed(seed)
        linear = torch.nn.Linear
        layers = [linear(8, 8), torch.nn.BatchNorm1d(8), linear(8, 8), linear(8, 1)]
        layers[2].weight = layers[0].weight
        for one in layers[3].parameters():
            one.requires_grad = False
        return make(stage, torch.nn.Sequential(*layers))

    engine = attach(begin(0))
    train(engine, 2)
    engine.save_checkpoint(folder, "first")
    saved = whole_state(engine)
    train(engine, 2)
    engine.save_checkpoint(folder, "second")
    found = {}
    for tag, options in (("first", {}), ("second", {"load_module_only": True})):
        other = attach(begin(1))
        path, _ = other.load_checkpoint(folder, tag, load_optimizer_states=False, **options)
        expected = saved if tag == "first" else whole_state(engine)
        found[tag] = [Path(path).parent.name, whole_state(other) == expected]
        train(other)
    found["changed"] = saved != whole_state(engine)
    return found


def whole_state(engine: Any) -> dict[str, list[float]]:
    """Return all parameters and buffers of an engine's module."""
    with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
        named = [*engine.module.named_parameters(), *engine.module.named_buffers()]
        return {name: one.detach().double().flatten().tolist() for name, one in named}


def full_weights(engine: Any) -> list[str]:
    """Return the sums of the weights in full precision, by group."""
    state = engine.optimizer.state_dict()
    groups = state.get("single_partition_of_fp32_groups", state.get("fp32_flat_groups"))
    return [float(one.double().sum()).hex() for one in groups] if groups else [weight(engine)]


class Wide(torch.nn.Module):
    """Layers that are large enough to be copied beside training, and a buffer that changes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(WIDTH, WIDTH), torch.nn.Linear(WIDTH, WIDTH)
        self.register_buffer("seen", torch.zeros(3))

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        return self.second(torch.relu(self.first(batch)))


def make_wide(stage: int, dtype: str) -> Any:
    """Return an engine that is not attached, after two steps."""
    changes = {"gradient_clipping": 1.0, "gradient_accumulation_steps": 2, **DTYPES[dtype]}
    engine = make(stage, Wide(), **changes)
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


def save_held(engine: Any, folder: str, write: Any = None, client: Any = None) -> tuple[bool, str]:
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


def load_held(engine: Any, folder: str) -> str:
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


def copies(folder: str, stage: int, dtype: str) -> dict[str, Any]:
    """Save three times, each in a folder of its own, while a gate holds the copy until the step."""
    found = {}
    for name, write in (("untouched", None), ("exchanged", exchange_weights)):
        engine = attach(make_wide(stage, dtype))
        is_held, expected = save_held(engine, f"{folder}/{name}", write)
        engine.holdfast_session.wait()
        loaded = load_held(make_wide(stage, dtype), f"{folder}/{name}")
        found[name] = [is_held, loaded == expected]
    for name, client in (("repeated", None), ("missing", {"step": 2})):
        engine = attach(make_wide(stage, dtype))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            is_held, _ = save_held(engine, f"{folder}/{name}", scale_moments, client)
        now = digest_of(engine)
        words = [str(one.message) for one in caught if "checkpoint held was dropped" in str(one.message)]
        engine.save_checkpoint(f"{folder}/{name}", "next")
        engine.holdfast_session.wait()
        loaded = load_held(make_wide(stage, dtype), f"{folder}/{name}")
        found[name] = [is_held, "equal" if loaded == now else loaded, words]
    return found


def main(name: str, folder: str, *args: str) -> None:
    gc.unfreeze()  # the tests' nursery freezes what it imports, as no script of a user does
    deepspeed.ops.__compatible_ops__.clear()  # else it compiles its own all-reduce first
    deepspeed.init_distributed("gloo")
    result = globals()[name](folder, *(int(one) if one.isdigit() else one for one in args))
    sys.stdout.write(json.dumps(result) + "\n")
    sys.stdout.flush()
    torch.distributed.barrier()


if __name__ == "__main__":
    main(*sys.argv[1:])
