"""Scenario with engines of DeepSpeed on one rank; argv: its name, a folder. Prints a JSON object."""

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
from pathlib import Path
from typing import Any

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import deepspeed
import torch

import holdfast
from holdfast import Checkpointer
from holdfast.adapters.deepspeed import attach
from holdfast.checkpoint.exchange import export_checkpoint
from holdfast.errors import HoldfastError, NotFound


def make(stage: int = 1, model: Any = None) -> Any:
    """Return an engine of a model, by default a small one."""
    torch.manual_seed(0)
    if model is None:
        model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.1, "torch_adam": True}},
        "zero_optimization": {"stage": stage},
    }
    return deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0]


def taken_over(folder: str, stage: int, dtype: str) -> dict[str, Any]:
    """Put a module and an optimizer that DeepSpeed has taken over into the state of a Checkpointer."""
    model = torch.nn.Linear(8, 1)
    optimizer = torch.optim.AdamW(model.parameters())
    other = torch.nn.Linear(8, 1)
    earlier = Checkpointer(Path(folder) / "earlier", {"optimizer": optimizer})
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "zero_optimization": {"stage": stage},
        **({"bf16": {"enabled": True}} if dtype == "bf16" else {}),
    }
    engine = deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]
    found = {"earlier": refusal(lambda: earlier.save(1))}
    states = {
        "model": {"model": engine.module},
        "optimizer": {"optimizer": optimizer},
        "others": {"model": other, "optimizer": torch.optim.AdamW(other.parameters())},
        "tensor": {"optimizer": torch.optim.AdamW([torch.zeros(3, requires_grad=True)])},
    }
    for name, state in states.items():
        found[name] = refusal(
            lambda name=name, state=state: Checkpointer(Path(folder) / f"live {name}", state)
        )
        found[f"save of {name}"] = refusal(
            lambda name=name, state=state: Checkpointer(Path(folder) / name).save(1, state)
        )
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
        found[str(tag)] = [
            made,
            Path(path).parent.name,
            weight(other) == weights["side" if tag == "same" else made],
        ]
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
    data = bytearray(file.read_bytes())
    data[-20] ^= 1
    file.write_bytes(data)
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
        layers = [
            torch.nn.Linear(8, 8),
            torch.nn.BatchNorm1d(8),
            torch.nn.Linear(8, 8),
            torch.nn.Linear(8, 1),
        ]
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
        found[tag] = [
            Path(path).parent.name,
            whole_state(other) == (saved if tag == "first" else whole_state(engine)),
        ]
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


def main(name: str, folder: str, *args: str) -> None:
    gc.unfreeze()  # the tests' nursery freezes what it imports, as no script of a user does
    deepspeed.ops.__compatible_ops__.clear()  # else it compiles its own all-reduce first
    deepspeed.init_distributed("gloo")
    result = globals()[name](folder, *(int(one) if one.isdigit() else one for one in args))
    sys.stdout.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
