"""A run that is restored into new objects and continued equals an uninterrupted one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from holdfast.checkpoint.state import State
from state.trip import Kept, Net, advance, assert_same_state, batch, kept, same, train, training

Make = Callable[[Any], torch.optim.Optimizer]

OPTIMIZERS: dict[str, Make] = {
    "sgd": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9),
    "sgd without momentum": lambda p: torch.optim.SGD(p, 0.1),
    "adamw": lambda p: torch.optim.AdamW(p, 1e-2),
    "adamw fused": lambda p: torch.optim.AdamW(p, 1e-2, fused=True),
    "adamw tensor lr": lambda p: torch.optim.AdamW(p, torch.tensor(1e-2)),
    "adam amsgrad": lambda p: torch.optim.Adam(p, 1e-2, amsgrad=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, 1e-2),
    "rmsprop": lambda p: torch.optim.RMSprop(p, 1e-2, momentum=0.5, centered=True),
    "adadelta": lambda p: torch.optim.Adadelta(p),
    "nadam": lambda p: torch.optim.NAdam(p, 1e-2),
    "lbfgs": lambda p: torch.optim.LBFGS(p, 0.1, max_iter=3, history_size=3),
    "adafactor": lambda p: torch.optim.Adafactor(p, 1e-2),
}


@pytest.mark.parametrize("has_stepped", [False, True], ids=["fresh", "used"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_resumes_bit_for_bit(name: str, has_stepped: bool) -> None:
    """Into optimizers that have no state yet, and into ones that have other state."""
    torch.manual_seed(1)
    objects = training(OPTIMIZERS[name], steps=3)
    saved = kept(objects)
    advance(objects, 3)
    torch.manual_seed(2)
    live = training(OPTIMIZERS[name], steps=5 if has_stepped else 0)
    load = saved.restore(State(live))
    assert not load.notes
    advance(live, 3)
    assert_same_state(objects, live)


class _Plateau(lr_scheduler.ReduceLROnPlateau):
    """A schedule whose metric never improves."""

    def step(self, metrics: Any = 1.0, epoch: Any = None) -> None:
        super().step(metrics)


SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "step": lambda o: lr_scheduler.StepLR(o, 2, 0.5),
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, 10),
    "restarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
    "one cycle": lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=20),
    "cyclic": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, step_size_up=3, cycle_momentum=False),
    "lambda": lambda o: lr_scheduler.LambdaLR(o, lambda n: 0.9**n),
    "multi step": lambda o: lr_scheduler.MultiStepLR(o, [2, 5]),
    "plateau": lambda o: _Plateau(o, patience=3),
    "sequential": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, 0.1, total_iters=2), lr_scheduler.ExponentialLR(o, 0.9)], [2]
    ),
    "chained": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.LinearLR(o, 0.1, total_iters=2), lr_scheduler.ExponentialLR(o, 0.9)]
    ),
}


@pytest.mark.parametrize("is_tensor", [False, True], ids=["float lr", "tensor lr"])
@pytest.mark.parametrize("name", SCHEDULERS)
def test_every_scheduler_resumes(name: str, is_tensor: bool) -> None:
    """The rates of all later steps are those of the uninterrupted run."""

    def build() -> tuple[dict[str, Any], Callable[[], list[float]]]:
        model = Net()
        rate = torch.tensor(0.1) if is_tensor else 0.1
        optimizer = torch.optim.AdamW(model.parameters(), rate)
        scheduler = SCHEDULERS[name](optimizer)

        def run() -> list[float]:
            rates: list[float] = []
            group = optimizer.param_groups[0]
            train(model, optimizer, 5, lambda: (scheduler.step(), rates.append(float(group["lr"]))))
            return rates

        return {"model": model, "optimizer": optimizer, "scheduler": scheduler}, run

    objects, run = build()
    run()
    saved = kept(objects)
    expected = run()
    objects2, run2 = build()
    saved.restore(State(objects2))
    assert run2() == expected
    assert len(set(expected)) > 1 or name == "multi step"
    assert_same_state(objects, objects2)


def test_grad_scaler_and_averaged_model_resume() -> None:

    def build(seed: int) -> tuple[dict[str, Any], Callable[[], None]]:
        torch.manual_seed(seed)
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)

        def run() -> None:
            for _ in range(3):
                x = batch()
                optimizer.zero_grad()
                scaler.scale(nn.functional.cross_entropy(model(x), x)).backward()
                scaler.step(optimizer)
                scaler.update()
                ema.update_parameters(model)

        return {"model": model, "optimizer": optimizer, "ema": ema, "scaler": scaler}, run

    objects, run = build(1)
    run()
    saved = kept(objects)
    assert "ema.module.embed.weight" in saved.tensors
    run()
    objects2, run2 = build(2)
    saved.restore(State(objects2))
    run2()
    assert objects["scaler"].get_scale() == objects2["scaler"].get_scale() != 8.0
    assert_same_state(objects, objects2)


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
def test_a_stateful_data_loader_resumes_within_an_epoch() -> None:
    loaders = pytest.importorskip("torchdata.stateful_dataloader")

    def build() -> Any:
        return loaders.StatefulDataLoader(list(range(40)), batch_size=4, shuffle=True)

    torch.manual_seed(5)
    loader = build()
    iterator = iter(loader)
    for _ in range(3):
        next(iterator)
    saved = kept({"data": loader})
    rest = [x.tolist() for x in iterator]
    torch.manual_seed(6)
    loader2 = build()
    saved.restore(State({"data": loader2}))
    assert [x.tolist() for x in loader2] == rest
    assert len(rest) == 7


def test_moments_of_a_wider_dtype_keep_every_bit() -> None:
    """float32 moments of bfloat16 parameters are not rounded on the way back."""

    def build() -> tuple[nn.Parameter, torch.optim.Optimizer]:
        parameter = nn.Parameter(torch.randn(5).bfloat16())
        return parameter, torch.optim.SGD([parameter], 0.1, momentum=0.9)

    parameter, optimizer = build()
    moment = torch.randn(5)
    optimizer.state[parameter]["momentum_buffer"] = moment
    saved = kept({"weight": parameter, "optimizer": optimizer})
    parameter2, optimizer2 = build()
    saved.restore(State({"weight": parameter2, "optimizer": optimizer2}))
    assert same(optimizer2.state[parameter2]["momentum_buffer"], moment)
    assert same(parameter2.detach(), parameter.detach())


def test_live_tensors_are_filled_in_place() -> None:
    """No second copy: parameters and existing moments are the targets themselves."""
    objects = training(steps=1)
    load = kept(objects).plan(State(objects))
    captured = State(objects).capture()
    live = {name: t.data_ptr() for name, t in captured.tensors.items() if not name.startswith("rng")}
    assert {name: load.targets[name][0].tensor.data_ptr() for name in live} == live


def test_planning_a_load_changes_nothing() -> None:
    """Until targets are filled and the load is finished, the live state is as it was."""
    objects: dict[str, Any] = {**training(), "epoch": 1, "list": [1, 2]}
    saved = kept(objects)
    advance(objects, 2)
    objects["epoch"], objects["list"][0] = 2, 7
    before = Kept(State(objects).capture())
    saved.plan(State(objects))
    after = Kept(State(objects).capture())
    assert same(before.tensors, after.tensors)
    assert before.text == after.text


def test_a_checkpoint_from_before_the_first_step_clears_moments() -> None:
    objects = training()
    saved = kept(objects)
    advance(objects, 2)
    saved.restore(State(objects))
    assert not objects["optimizer"].state
    advance(objects, 1)
    assert int(objects["optimizer"].state[objects["model"].embed.weight]["step"]) == 1
