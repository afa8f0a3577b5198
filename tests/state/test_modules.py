"""Names, replication and loading of modules under any wrapper."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch._C._distributed_c10d import HashStore
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

from holdfast.checkpoint.state import State, assign, per_rank, replicated
from holdfast.errors import InvalidInput, Unsupported
from stage.ranks import run_ranks
from state.trip import Net, advance, assert_same_state, kept, same, step_once, train, training


def _compiled_inside() -> nn.Module:
    model: Any = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))
    model[1][0] = torch.compile(model[1][0], backend="eager")
    model[0] = checkpoint_wrapper(model[0])
    return model


class Module(nn.Module):
    """Names that look like those of wrappers, but are not."""

    def __init__(self) -> None:
        super().__init__()
        self.module = nn.Linear(2, 2)
        self._orig_mod = nn.ModuleDict({"module": nn.Linear(2, 2)})


WRAPPED: dict[str, Callable[[], Any]] = {
    "plain": Net,
    "compiled": lambda: torch.compile(Net(), backend="eager"),
    "checkpointed": lambda: checkpoint_wrapper(Net()),
    "compiled and checkpointed inside": _compiled_inside,
    "compiled around checkpointed": lambda: torch.compile(checkpoint_wrapper(Net()), backend="eager"),
    "misleading names": Module,
    "parametrized": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(2, 2)),
    "data parallel": lambda: nn.DataParallel(Net()),
    "batch norm": lambda: nn.Sequential(nn.BatchNorm1d(2), nn.SyncBatchNorm(2)),
}


@pytest.mark.parametrize("name", WRAPPED)
def test_names_equal_those_of_torch_distributed_checkpoint(name: str) -> None:
    """With ties resolved, our names are the keys of get_model_state_dict()."""
    model = WRAPPED[name]()
    captured = State({"m": model}).capture()
    ours = {n for n in [*captured.tensors, *captured.structure.tied] if not n.startswith("rng")}
    theirs: dict[str, Any] = get_model_state_dict(model)
    assert ours == {f"m.{fqn}" for fqn in theirs}
    for fqn, tensor in theirs.items():
        found = captured.tensors[captured.structure.tied.get(f"m.{fqn}", f"m.{fqn}")]
        assert found.data_ptr() == tensor.data_ptr()


@pytest.mark.parametrize("into", WRAPPED)
def test_a_checkpoint_loads_into_any_wrapper(into: str) -> None:
    torch.manual_seed(1)
    model, other = WRAPPED[into](), WRAPPED[into]()
    kept({"m": model}).restore(State({"m": other}))
    assert_same_state({"m": model}, {"m": other})


def test_non_persistent_buffers_and_gradients_are_left_out() -> None:
    """Only what state_dict() holds is saved; frozen parameters are part of it."""
    model = nn.Linear(2, 2)
    model.register_buffer("scratch", torch.zeros(3), persistent=False)
    model.register_buffer("kept", torch.zeros(3))
    model.bias.requires_grad_(False)
    captured = State({"m": model}).capture()
    assert [n for n in captured.tensors if n.startswith("m.")] == ["m.weight", "m.bias", "m.kept"]
    assert not any(t.requires_grad for t in captured.tensors.values())
    assert captured.tensors["m.weight"]._version == model.weight._version
    with torch.no_grad():
        model.weight.add_(1)
    assert captured.tensors["m.weight"]._version == model.weight._version


class Extra(nn.Module):
    """Extra state with a tensor and a value in it."""

    def __init__(self, seen: int = 0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.table, self.seen = torch.full((3,), float(seen)), seen

    def get_extra_state(self) -> Any:
        return {"table": self.table, "seen": self.seen}

    def set_extra_state(self, state: Any) -> None:
        self.table, self.seen = state["table"], state["seen"]


def test_extra_state_is_restored() -> None:
    """Its tensors stand among the tensors, the rest among the values."""
    model = nn.Sequential(Extra(4), nn.Linear(1, 1))
    other: Any = nn.Sequential(Extra(), nn.Linear(1, 1))
    saved = kept({"m": model})
    assert "m.0._extra_state.table" in saved.tensors
    saved.restore(State({"m": other}))
    assert other[0].seen == 4
    assert other[0].table.tolist() == [4.0] * 3


def test_state_dict_hooks_run_at_save_and_load() -> None:
    """A module that saves its weight transposed loads it through its own hook."""

    def build() -> Any:
        model: Any = nn.Linear(2, 3, bias=False)

        def save(module: Any, state: dict[str, Any], prefix: str, _: Any) -> None:
            state[prefix + "turned"] = state.pop(prefix + "weight").detach().t().clone()

        def load(module: Any, state: dict[str, Any], prefix: str, *_: Any) -> None:
            if prefix + "turned" in state:
                state[prefix + "weight"] = state.pop(prefix + "turned").t()

        model.register_state_dict_post_hook(save)
        model.register_load_state_dict_pre_hook(load)
        return nn.Sequential(model)

    model, other = build(), build()
    saved = kept({"m": model})
    assert [n for n in saved.tensors if n.startswith("m")] == ["m.0.turned"]
    saved.restore(State({"m": other}))
    assert same(model[0].weight, other[0].weight)


def test_unusual_memory_formats_are_restored() -> None:
    """Non-contiguous, expanded, empty, 0-dim and complex tensors keep values, and the live strides."""

    def build() -> Any:
        model: Any = nn.Module()
        model.conv = nn.Conv2d(3, 4, 3)
        model.conv.weight.data = model.conv.weight.data.contiguous(memory_format=torch.channels_last)
        model.register_buffer("wide", torch.randn(1).expand(5))
        model.register_buffer("empty", torch.empty(0, 3))
        model.register_buffer("scalar", torch.randn(()))
        model.register_buffer("complex", torch.randn(3, dtype=torch.complex64).conj())
        model.register_buffer("small", torch.randn(4).to(torch.float8_e4m3fn))
        return model

    model, other = build(), build()
    saved = kept({"m": model})
    assert not saved.tied
    saved.restore(State({"m": other}))
    for name, tensor in model.state_dict().items():
        assert same(tensor.resolve_conj(), other.state_dict()[name].resolve_conj()), name
    assert other.conv.weight.is_contiguous(memory_format=torch.channels_last)


def test_tied_tensors_are_saved_once_and_stay_tied() -> None:
    """The first name in order holds the bytes; tied slices of one storage are not mistaken for ties."""
    model, other = Net(), Net()
    captured = State({"m": model, "also": {"w": model.embed.weight, "row": model.embed.weight[0]}}).capture()
    assert captured.structure.tied == {"m.out.weight": "m.embed.weight", "also.w": "m.embed.weight"}
    assert "also.row" in captured.tensors
    kept({"m": model}).restore(State({"m": other}))
    assert other.out.weight is other.embed.weight
    assert same(other.embed.weight, model.embed.weight)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_tied_checkpoint_fills_untied_tensors(device: str) -> None:
    """Two separate parameters do not come to share memory."""
    model = Net()
    with torch.device(device):
        other = Net()
        other.out.weight = nn.Parameter(torch.empty(11, 8))
    kept({"m": model}).restore(State({"m": other}))
    assert other.out.weight.data_ptr() != other.embed.weight.data_ptr()
    assert same(other.out.weight, model.embed.weight)
    assert same(other.embed.weight, model.embed.weight)


def test_a_meta_module_is_materialized_with_its_optimizer() -> None:
    """Parameters keep their identity: the optimizer that was made on meta continues to train them."""
    torch.manual_seed(0)
    objects = training(steps=2)
    saved = kept(objects)
    advance(objects, 2)
    with torch.device("meta"):
        blank: Any = Net()
    blank.embed.weight.mark = "kept"
    optimizer2 = torch.optim.AdamW(blank.parameters())
    saved.restore(State({"model": blank, "optimizer": optimizer2}))
    assert blank.out.weight is blank.embed.weight
    assert blank.embed.weight.mark == "kept"
    assert not any(t.is_meta for t in [*blank.parameters(), *blank.buffers()])
    train(blank, optimizer2, 2)
    assert_same_state(objects, {"model": blank, "optimizer": optimizer2})


def test_the_error_names_meta_buffers_without_values() -> None:
    saved = kept({"m": nn.Linear(1, 1)})
    with torch.device("meta"):
        blank = nn.Linear(1, 1)
        blank.register_buffer("rope", torch.zeros(2), persistent=False)
    with pytest.raises(InvalidInput, match="rope"):
        saved.plan(State({"m": blank}))


@pytest.mark.parametrize(
    ("make", "why"),
    [(lambda: nn.Linear(1, 1, device="meta"), "meta"), (lambda: nn.LazyLinear(2), "lazy module")],
    ids=["meta", "lazy"],
)
def test_a_module_without_bytes_is_refused_by_name(make: Callable[[], nn.Module], why: str) -> None:
    with pytest.raises(Unsupported, match=rf"m\.weight.*{why}"):
        State({"m": make()}).capture()


def test_a_changed_wrapper_with_equal_keys_is_detected() -> None:
    """A compiled module and one whose child happens to be called like its inside have the same keys."""
    inside = nn.Linear(1, 1)
    plain: Any = nn.Module()
    plain._orig_mod = inside
    model: Any = nn.Module()
    model.a = torch.compile(inside, backend="eager")
    state = State({"m": model})
    assert "m.a.weight" in state.capture().tensors
    model.a = plain
    assert "m.a._orig_mod.weight" in state.capture().tensors


def facts_of(rank: int) -> dict[str, Any]:
    """Facts about a captured state of one rank."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    ddp = DistributedDataParallel(torch.compile(model, backend="eager"))  # pyright: ignore[reportArgumentType]
    inner = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    quiet, own = DistributedDataParallel(inner, broadcast_buffers=False), nn.Linear(2, 2)
    optimizer = step_once(torch.optim.AdamW(ddp.parameters()))
    own_optimizer = step_once(torch.optim.SGD(own.parameters(), 0.1, momentum=0.9))
    objects: dict[str, Any] = {"optimizer": optimizer, "model": ddp, "lone": nn.BatchNorm1d(2)}
    objects |= {"quiet": quiet, "own": per_rank(own), "own_optimizer": own_optimizer}
    objects |= {"table": replicated(torch.zeros(9)), "list": [torch.zeros(2)], "step": rank}
    captured = State(objects).capture()
    structure, sizes = captured.structure, {n: t.nbytes for n, t in captured.tensors.items()}
    return {
        "names": list(captured.tensors),
        "per_rank": structure.per_rank,
        "lowest": sorted(n for n, s in structure.shardings.items() if s.layout.copies == ((0,),)),
        "owned": structure.owned,
        "owners": {n: one.ranks[0] for n, one in assign(sizes, structure.shardings).items()},
        "sizes": sizes,
        "tied": structure.tied,
    }


@pytest.mark.ranks
def test_two_ranks_plan_alike_without_communication() -> None:
    """Names, spread and assignment are equal on both ranks, and each kind of tensor is spread rightly."""
    first, second = run_ranks(2, facts_of)
    assert first == second
    buffers = ("running_mean", "running_var", "num_batches_tracked")
    assert first["lowest"] == sorted(f"model.1.{b}" for b in buffers)
    assert first["per_rank"] == {
        *(f"lone.{b}" for b in buffers),
        *(f"quiet.1.{b}" for b in buffers),
        *("own.weight", "own.bias", "list.0", "rng.torch"),
        *(f"own_optimizer.state.own.{name}.momentum_buffer" for name in ("weight", "bias")),
    }
    assert "optimizer.state.model.0.weight.exp_avg" in first["owners"]
    assert {"model.0.weight", "optimizer.state.model.2.bias.step"} <= first["owned"]
    assert not {"lone.weight", "table", "model.1.running_mean"} & first["owned"]
    assert set(first["owners"]) == set(first["names"]) - first["per_rank"]
    assert set(first["owners"].values()) == {0, 1}
    assert all(first["owners"][name] == 0 for name in first["lowest"])


@pytest.fixture
def group_of_one() -> Iterator[None]:
    """A process group with this process alone."""
    torch.distributed.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("group_of_one")
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")  # torch's, about FSDP1
@pytest.mark.parametrize("is_fsdp", [False, True])
def test_a_saved_sparse_buffer_without_a_live_one_is_unexpected(is_fsdp: bool) -> None:
    model = nn.Linear(2, 2)
    model.register_buffer("adjacent", torch.eye(2).to_sparse())
    live: Any = nn.Linear(2, 2)
    if is_fsdp:
        live = FullyShardedDataParallel(live, device_id=torch.device("cpu"))
    with pytest.raises(InvalidInput, match="in the checkpoint but not in the live state"):
        kept({"model": model}).restore(State({"model": live}))


@pytest.mark.usefixtures("group_of_one")
def test_one_rank_has_no_per_rank_tensors() -> None:
    """A process group of one behaves as none, and DDP does not show in names."""
    model: Any = DistributedDataParallel(torch.compile(Net(), backend="eager"))
    marked = {"own": per_rank(nn.Linear(1, 1)), "all": replicated([torch.zeros(1)])}
    captured = State({"model": model, **marked}).capture()
    assert captured.structure.per_rank == frozenset()
    assert {sharding.layout.copies for sharding in captured.structure.shardings.values()} == {((0,),)}
    assert captured.structure.shardings.keys() == captured.tensors.keys()
    assert "model.norm.running_mean" in captured.tensors
    ours = {n for n in [*captured.tensors, *captured.structure.tied] if n.startswith("model")}
    assert ours == {f"model.{fqn}" for fqn in get_model_state_dict(model)}
    plain = Net()
    saved = kept({"model": model})
    saved.restore(State({"model": plain}))
    assert same(plain.inner.weight, model.module._orig_mod.inner.weight)
    saved.restore(State({"model": model}))
