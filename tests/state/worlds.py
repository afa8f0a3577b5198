"""Gloo ranks that hold one small model in many layouts, for the tests of sharded states."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, StateDictType, fully_shard

from holdfast.checkpoint.format.manifest import Tensor
from holdfast.checkpoint.state import CapturedState, Load, State, assign
from holdfast.checkpoint.state.tensors import dtype_name
from layouts import LAYOUTS, Net, Trained, gather, mesh_of, tensor_parallel, whole
from state.trip import fill

FOUR = (
    *("ddp", "fsdp", "unresharded", "offload", "hsdp", "partly", "tp-pairs", "fsdp-tp"),
    *("fsdp1", "fsdp1-mesh", "fsdp1-hybrid", "fsdp1-hybrid-groups", "pipeline", "pipeline-fsdp"),
)
TWO = ("ddp", "fsdp", "unresharded", "partly", "tp-pairs", "fsdp1", "pipeline")
"""Layouts on 4 ranks and on 2 that are saved and loaded."""


class Setup(Trained):
    """A model in a layout, its optimizer, and their state."""

    def __init__(self, model: nn.Module, *, is_reversed: bool = False) -> None:
        self.model: Any = model
        named = list(model.named_parameters())
        weights = [p for name, p in named if not _is_vector(name)]
        others = [p for name, p in named if _is_vector(name)]
        groups: list[Any] = [{"params": weights, "weight_decay": 0.1}, {"params": others, "lr": 0.5}]
        # Not foreach: it does not take plain tensors and DTensors, or DTensors of several meshes, together.
        self.optimizer = torch.optim.AdamW(groups[::-1] if is_reversed else groups, lr=0.01, foreach=False)
        self.objects: dict[str, Any] = {"model": model, "optimizer": self.optimizer, "epoch": 3}
        self.state = State(self.objects)
        self.state.agree(gather)

    def full(self) -> dict[str, torch.Tensor]:
        """Every parameter and its state, gathered by DTensor's own collectives; under canonical names."""
        if isinstance(self.model, FullyShardedDataParallel):
            return self._full_flat()
        found: dict[str, torch.Tensor] = {}
        self.model.state_dict()  # lets FSDP put its shards back
        for name, parameter in self.model.named_parameters():
            name = f"model.{name.removeprefix('module.')}"
            found[name] = whole(parameter)
            for key, value in self.optimizer.state.get(parameter, {}).items():
                found[f"optimizer.state.{name}.{key}"] = whole(value)
        return found

    def _full_flat(self) -> dict[str, torch.Tensor]:
        fsdp = FullyShardedDataParallel
        with fsdp.state_dict_type(self.model, StateDictType.FULL_STATE_DICT):
            found = {f"model.{name}": t.clone() for name, t in self.model.state_dict().items()}
        # Not by FSDP1's full optimizer state: on the CPU that gives one tensor's bytes for all of its kind.
        shards: dict[str, list[torch.Tensor]] = {}
        for states in gather({n: self.optimizer.state.get(p, {}) for n, p in self.model.named_parameters()}):
            for name, slots in states.items():
                for key, value in slots.items():
                    label = f"model.{name.replace('_fsdp_wrapped_module.', '')}/{key}"
                    shards.setdefault(label, []).append(value)
        for label, values in shards.items():
            name, key = label.split("/")
            shape = found[name].shape
            once = values[: len(values) // self._num_replicas()]
            full = values[0] if key == "step" else torch.cat(once).reshape(shape)
            found[f"optimizer.state.{name}.{key}"] = full
        return found

    def _num_replicas(self) -> int:
        is_hybrid = self.model.sharding_strategy is ShardingStrategy.HYBRID_SHARD
        return 2 if is_hybrid else 1


def _is_vector(name: str) -> bool:
    return "norm" in name or name.endswith("bias")


class Checkpoint:
    """What all ranks' files hold together: each tensor put together from the regions that were written."""

    def __init__(self, told: list[dict[str, Any]]) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        covered: dict[str, torch.Tensor] = {}
        self.tied: dict[str, str] = {}
        for rank, one in enumerate(told):
            self.tied.update(one["tied"])
            for name, (local, partitioning, shape) in one["written"].items():
                whole = self.tensors.setdefault(name, torch.zeros(shape, dtype=local.dtype))
                assert whole.shape == shape
                region = partitioning.region_at(partitioning.indices_of(rank)[0], shape)
                whole[region.slices].copy_(local)
                covered.setdefault(name, torch.zeros(shape, dtype=torch.int))[region.slices].add_(1)
        for name, times in covered.items():
            assert bool((times == 1).all()), f"{name} is not written once: {times}"
        self.specs = {n: Tensor(dtype_name(t.dtype), tuple(t.shape), None) for n, t in self.tensors.items()}
        self.values = [one["values"] for one in told]
        self.num_bytes = [one["num_bytes"] for one in told]
        self.alike = [one["alike"] for one in told]

    def load(self, state: State, rank: int, **options: Any) -> Load:
        """Restore into a state, with this rank's values and one part of each other structure."""
        mine = min(rank, len(self.values) - 1)
        others = [self.values[i] for i in range(len(self.values)) if i != mine]
        load = state.load(self.specs, self.tied, self.values[mine], others=others, **options)
        fill(load, self.tensors)
        load.finish()
        return load


def told(captured: CapturedState, rank: int) -> dict[str, Any]:
    """What a rank writes of a captured state."""
    sizes = {
        n: torch.Size(s.shape).numel() * captured.tensors[n].element_size()
        for n, s in captured.structure.shardings.items()
    }
    partitionings = assign(sizes, captured.structure.shardings)
    assert partitionings.keys() == captured.tensors.keys() - captured.structure.per_rank
    written = {
        name: (captured.tensors[name].clone(), partitioning, captured.structure.shardings[name].shape)
        for name, partitioning in partitionings.items()
        if rank in partitioning.ranks
    }
    for name, (local, partitioning, shape) in written.items():
        (region,) = captured.structure.shardings[name].regions_of(rank)
        assert [region] == [partitioning.region_at(i, shape) for i in partitioning.indices_of(rank)]
        assert region.num_items == local.numel()
    return {
        "written": written,
        "tied": captured.structure.tied,
        "values": copy.deepcopy({k: v for k, v in captured.values.items() if k != "rng"}),
        "num_bytes": sum(local.nbytes for local, _, _ in written.values()),
        "alike": sorted((name, one.ranks) for name, one in partitionings.items()),
    }


def save_all(rank: int, folder: Path, names: tuple[str, ...]) -> None:
    """Train in every layout, capture, and compare what all ranks write with what DTensor gathers."""
    for name in names:
        torch.manual_seed(1)
        setup = Setup(LAYOUTS[name]())
        setup.train()
        captured = setup.state.capture()
        assert setup.state.capture().structure is captured.structure, name
        checkpoint = Checkpoint(gather(told(captured, rank)))
        full = setup.full()
        for key, tensor in full.items():
            found = checkpoint.tensors[checkpoint.tied.get(key, key)]
            assert torch.equal(found, tensor), (name, key)
        _check_facts(captured, full)
        if rank == 0:
            torch.save(vars(checkpoint), folder / f"{name}.pt")
    gather(None)  # rank 0 has written


def _check_facts(captured: CapturedState, full: dict[str, torch.Tensor]) -> None:
    names = full.keys() & captured.tensors.keys()
    is_flat = "model.head.weight" in captured.tensors  # FSDP1 gives copies: nothing is tied, nothing is owned
    assert captured.structure.owned == (frozenset() if is_flat else names)
    assert captured.structure.frozen == frozenset()
    assert {"optimizer.state.model.up.weight.exp_avg", "model.tail.weight"} & names


def load_all(rank: int, folder: Path, names: tuple[str, ...]) -> None:
    """Load checkpoints of all layouts into all layouts, before the first step and after one, and compare."""
    checkpoints = {str(path): opened(path) for path in sorted(folder.rglob("*.pt"))}
    assert checkpoints
    for j, name in enumerate(names):
        for i, (key, checkpoint) in enumerate(checkpoints.items()):
            if dist.is_initialized() and (i + j) % 3:
                continue  # a third of all pairs tells enough
            torch.manual_seed(100 + i)
            setup = Setup(LAYOUTS[name](), is_reversed=i % 2 == 1)
            if i % 2 == 0 and name != "on-meta":
                setup.train()
            load = checkpoint.load(setup.state, rank, only=["model", "optimizer", "epoch"])
            assert not load.missing, (key, name)
            assert not load.unexpected, (key, name)
            assert setup.objects["epoch"] == 3
            decays = {g["weight_decay"]: g["lr"] for g in setup.optimizer.param_groups if g["params"]}
            assert decays == {0.1: 0.01, 0.01: 0.5}
            _check_loaded(setup, checkpoint, (key, name))
            if i == j or name == "on-meta":
                setup.train()  # what was loaded can be trained


def _check_loaded(setup: Setup, checkpoint: Checkpoint, where: Any) -> None:
    full = setup.full()
    assert any(key.endswith("exp_avg_sq") for key in full)
    for key, tensor in full.items():
        assert torch.equal(tensor, checkpoint.tensors[checkpoint.tied.get(key, key)]), (*where, key)


def trip(rank: int, folder: Path, names: tuple[str, ...], more: tuple[str, ...] = ()) -> None:
    """Save in every layout, then load all that has been saved into every layout, and into `more`."""
    own = folder / str(dist.get_world_size())
    own.mkdir(exist_ok=True)
    if dist.get_world_size() == 4:
        odd(rank, folder)
    save_all(rank, own, names)
    load_all(rank, folder, (*names, *more))


def odd(rank: int, folder: Path) -> None:
    """What the matrix has no place for: strided shards of uneven rows, and FSDP1 with flat parameters."""
    _check_uneven_strided_rows(rank)
    _check_flat_parameters(rank)


def _check_uneven_strided_rows(rank: int) -> None:
    """11 rows over 2 tensor parallel ranks over 2 of FSDP: torch's own gathering is not sure of these."""
    torch.manual_seed(3)
    model: Any = nn.ModuleDict({"up": nn.Linear(6, 11), "down": nn.Linear(11, 6)})
    expected = {f"model.{name}": p.detach().clone() for name, p in model.named_parameters()}
    mesh = mesh_of(2, 2, names=("data", "tensor"))
    tensor_parallel(model, mesh["tensor"])
    for layer in model.values():
        fully_shard(layer, mesh=mesh["data"])
    state = State({"model": model})
    state.agree(gather)
    checkpoint = Checkpoint(gather(told(state.capture(), rank)))
    for name, tensor in expected.items():
        assert torch.equal(checkpoint.tensors[name], tensor), name


def _check_flat_parameters(rank: int) -> None:
    """Two nested units; the optimizer sees one flat tensor of each."""

    def made() -> tuple[Any, torch.optim.Optimizer, State]:
        cpu = torch.device("cpu")
        model: Any = Net()
        model.up = FullyShardedDataParallel(model.up, device_id=cpu)
        model = FullyShardedDataParallel(model, device_id=cpu)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        return model, optimizer, State({"model": model, "optimizer": optimizer})

    def step(model: Any, optimizer: torch.optim.Optimizer) -> None:
        model(torch.arange(5)).backward()
        optimizer.step()
        optimizer.zero_grad()

    model, optimizer, state = made()
    step(model, optimizer)
    checkpoint = Checkpoint(gather(told(state.capture(), rank)))
    model2, optimizer2, state2 = made()
    load = checkpoint.load(state2, rank, only=["model", "optimizer"])
    assert not load.missing
    assert not load.unexpected
    step(model, optimizer)
    step(model2, optimizer2)
    for a, b in zip(model.parameters(), model2.parameters(), strict=True):
        assert torch.equal(a, b)


def opened(path: Path) -> Checkpoint:
    """A checkpoint that `save_all` has left."""
    checkpoint = Checkpoint([])
    vars(checkpoint).update(torch.load(path, weights_only=False))
    return checkpoint
