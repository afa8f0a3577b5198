"""Trainings of tests under Ray Train: `ray_trainer.py SCENARIO FOLDER TOTAL WORKERS`.

Scenarios: `killed` ends a worker by SIGKILL once, `ended` does so after the last step's save, `reclaimed`
takes the worker's node away after a notice, and `whole` is not interrupted. A completed step is a line of
FOLDER/progress.log. The last line of the output is the result as JSON.
"""

# Ray is not in every environment.
# pyright: reportMissingImports=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import ray
import ray.train
from ray.cluster_utils import Cluster
from ray.train import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer, prepare_model

from holdfast.adapters import ray as holdfast_ray


def train(config: dict[str, Any]) -> None:
    """Train on one worker of Ray's."""
    import torch
    import torch.distributed as dist

    import holdfast

    folder = Path(config["folder"])
    (folder / "node").write_text(ray.get_runtime_context().get_node_id())
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Dropout(0.1), torch.nn.Linear(32, 1))
    net = prepare_model(model)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    state = {"model": net, "optimizer": optimizer}
    with holdfast.Checkpointer(folder / "home", state, every=config["every"]) as ckpt:
        for step in ckpt.steps(config["total"]):
            optimizer.zero_grad()
            net(torch.full((8, 16), float(step))).square().mean().backward()
            optimizer.step()
            if dist.get_rank() == 0:
                with (folder / "progress.log").open("a") as log:
                    log.write(f"{dist.get_world_size()} {step + 1}\n")
            holdfast_ray.report(ckpt, {"step": step + 1})
            if config["scenario"] == "killed" and step == 17:
                kill_once(folder)
            if config["scenario"] == "reclaimed":
                time.sleep(0.2)  # as a step of a greater model would take
        ckpt.finish(config["total"])
        if dist.get_rank() == 0:
            names = [f"model.{name}" for name, _ in model.named_parameters()]
            found = optimizer.state_dict()
            moments = {names[number]: one for number, one in found["state"].items()}
            groups = [{**one, "params": [names[of] for of in one["params"]]} for one in found["param_groups"]]
            live = {"model": model.state_dict(), "optimizer": {"state": moments, "param_groups": groups}}
            torch.save(live, folder / "live.pt")
        ckpt.wait()
        if config["scenario"] == "ended":
            kill_once(folder)
        content = b"".join(tensor.numpy().tobytes() for tensor in model.state_dict().values())
        holdfast_ray.report(ckpt, {"digest": hashlib.sha256(content).hexdigest()})


def kill_once(folder: Path) -> None:
    """Kill rank 1, unless it was killed before."""
    import torch.distributed as dist

    if not (folder / "killed").exists():
        dist.barrier()
        if dist.get_rank() == 1:
            (folder / "killed").touch()
            os.kill(os.getpid(), signal.SIGKILL)


def reclaim(cluster: Cluster, nodes: list[Any], folder: Path) -> None:
    """Notify the worker of its node's end, then end that node."""
    log = folder / "progress.log"
    while not log.exists() or log.read_text().count("\n") < 5:
        time.sleep(0.05)
    (node,) = (one for one in nodes if one.node_id == (folder / "node").read_text())
    command = [sys.executable, "-m", "ray.scripts.scripts", "drain-node", "--address", cluster.address]
    reason = ["--reason", "DRAIN_NODE_REASON_PREEMPTION", "--reason-message", "reclaimed"]
    subprocess.run(
        [*command, "--node-id", node.node_id, *reason, "--deadline-remaining-seconds", "30"], check=True
    )
    while not any((folder / "home").glob("step-*/manifest-*")):
        time.sleep(0.05)
    cluster.remove_node(node, allow_graceful=False)


def main(scenario: str, folder: Path, total: int, num_workers: int) -> None:
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    nodes = [cluster.add_node(num_cpus=num_workers) for _ in range(2 if scenario == "reclaimed" else 1)]
    ray.init(address=cluster.address, log_to_driver=False)
    if scenario == "reclaimed":
        threading.Thread(target=reclaim, args=(cluster, nodes, folder), daemon=True).start()
    every = 5 if scenario == "killed" else 1000  # 1000: only a notice saves, and the end
    trainer = TorchTrainer(
        train,
        train_loop_config={"folder": str(folder), "scenario": scenario, "total": total, "every": every},
        scaling_config=ScalingConfig(num_workers=num_workers),
        run_config=RunConfig(
            storage_path=str(folder / "ray"),
            failure_config=FailureConfig(max_failures=int(scenario in ("killed", "ended"))),
            checkpoint_config=CheckpointConfig(num_to_keep=2),
        ),
    )
    result = trainer.fit()
    assert result.checkpoint is not None
    assert result.metrics is not None
    checkpoint = holdfast_ray.open(result.checkpoint)
    found = {
        "step": checkpoint.step,
        "num_tensors": len(checkpoint.keys()),
        "digest": result.metrics["digest"],
        "ray_bytes": sum(path.stat().st_size for path in (folder / "ray").rglob("*") if path.is_file()),
    }
    sys.stdout.write(json.dumps(found) + "\n")
    sys.stdout.flush()
    ray.shutdown()
    cluster.shutdown()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
