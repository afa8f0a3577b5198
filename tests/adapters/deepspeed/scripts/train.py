"""Trains a small model with DeepSpeed, and reports the end of the run; argv: folder of checkpoints, plan.

The plan is a JSON object. `stage`: of ZeRO; `dtype`: "fp32" or "bf16"; `steps`: in all; `every`: steps
between two saves; `kill_at`: step after which this process is killed; `lives`: the same, counted from the
start, and `delay_s` later, while it trains; `rank`: the one that is; `signal`: to be sent instead; `stock`:
do not attach the engine; `resume`: load the newest checkpoint; `client_state`: have one.
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
import random
import signal
import sys
import threading
from typing import Any

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import deepspeed
import torch
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

from adapters.digest import digest

DTYPES = {"bf16": {"bf16": {"enabled": True}}, "fp32": {}}


class Model(torch.nn.Module):
    """Layers with dropout, and a buffer that changes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(8, 15), torch.nn.Linear(15, 15)
        self.last = torch.nn.Linear(15, 1)
        self.dropout = torch.nn.Dropout(0.2)
        self.register_buffer("seen", torch.zeros(3))

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        hidden = self.dropout(torch.relu(self.first(batch)))
        return self.last(self.dropout(torch.relu(self.second(hidden)))).float().square().mean()


def digest_of(engine: Any, stage: int) -> str:
    """Return a digest of the state, whole and without padding, which ZeRO 3 does not initialize."""
    parts = [engine.lr_scheduler.state_dict(), dict(engine.module.named_buffers())]
    if stage == 0:
        parts.append(engine.optimizer.state_dict())
    if stage in (1, 2):
        engine.optimizer._lazy_init_hp_params_optimizer_state()  # else only a step does
    for one in engine.module.parameters() if stage else ():
        parts.append(safe_get_full_fp32_param(one))
        parts += [safe_get_full_optimizer_state(one, key) for key in ("exp_avg", "exp_avg_sq")]
    return digest(parts)


def make_engine(plan: dict[str, Any]) -> Any:
    """Return an engine of the model, without Holdfast."""
    torch.manual_seed(0)
    model = Model()
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.05, "torch_adam": True}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 0.05, "warmup_num_steps": 20}},
        "zero_optimization": {"stage": plan["stage"]},
        **DTYPES[plan.get("dtype", "fp32")],
    }
    return deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0]


def kill_if_due(engine: Any, plan: dict[str, Any], step: int, start: int) -> None:
    """Kill this process, or have it killed a little later, if the plan has it after this step."""
    if step == plan.get("kill_at"):
        os.kill(os.getpid(), plan.get("signal", signal.SIGKILL))
    if step - start == plan.get("lives"):
        kill = threading.Timer(plan.get("delay_s", 0), os.kill, (os.getpid(), signal.SIGKILL))
        kill.daemon = True
        kill.start()


def main(folder: str, plan: dict[str, Any]) -> None:
    deepspeed.ops.__compatible_ops__.clear()  # else it compiles its own all-reduce first
    deepspeed.init_distributed("gloo")
    engine = make_engine(plan)
    step = 0
    if not plan.get("stock"):
        from holdfast.adapters.deepspeed import attach

        has_function = plan.get("client_state") == "function"
        attach(engine, client_state=(lambda: {"step": step + 1}) if has_function else None)
    rank = engine.global_rank
    torch.manual_seed(100 + rank)
    random.seed(rank)
    if plan.get("resume"):
        path, client = engine.load_checkpoint(folder)
        step = 0 if path is None else engine.global_steps
        if path is not None and plan.get("client_state"):
            assert client["step"] == step, (client["step"], step)
    start, losses = step, []
    sys.stdout.write(json.dumps({"start": start}) + "\n")
    sys.stdout.flush()
    dtype = next(engine.module.parameters()).dtype
    while step < plan["steps"]:
        loss = engine(torch.randn(4, 8, dtype=dtype) * (1 + random.random()))
        engine.backward(loss)
        engine.step()
        step += 1
        losses.append(float(loss).hex())
        if step % plan.get("every", 1) == 0:
            client = {"client_state": {"step": step}} if plan.get("client_state") else {}
            engine.save_checkpoint(folder, **client)
        if rank == plan.get("rank", 0):
            kill_if_due(engine, plan, step, start)
    result = {"start": start, "losses": losses, "digest": digest_of(engine, plan["stage"])}
    sys.stdout.write(json.dumps(result) + "\n")
    if not plan.get("stock"):
        engine.holdfast_session.wait()
    torch.distributed.barrier()


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
