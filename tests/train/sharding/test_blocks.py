"""Blocks, layouts of ranks, and devices that a model is sharded over."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from holdfast import InvalidInput
from holdfast.train.sharding.process_group import choose_device, make_mesh_layout
from holdfast.train.sharding.shard import find_blocks
from train.sharding.models import ConvNet, Gpt, Layer, make


class TutorialNet(nn.Module):
    """The FSDP tutorial's network, in its sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 32, 3, 1), nn.Conv2d(32, 64, 3, 1)
        self.dropout1, self.dropout2 = nn.Dropout(0.25), nn.Dropout(0.5)
        self.fc1, self.fc2 = nn.Linear(9216, 128), nn.Linear(128, 10)


def kinds(model: nn.Module, names: tuple[str, ...]) -> Counter[str]:
    return Counter(type(model.get_submodule(name)).__name__ for name in names)


def test_layers_of_a_list_are_the_blocks_without_a_tied_embedding() -> None:
    found = find_blocks(Gpt())
    assert found.names == ("layers.0", "layers.1", "layers.2")
    assert found.found == "repeated layers: Layer"
    found = find_blocks(make("t5"))
    assert found.names == ("encoder.block.0", "encoder.block.1", "decoder.block.0", "decoder.block.1")
    assert found.left == ()


def test_a_network_without_layers_is_divided_by_size_as_in_the_tutorial() -> None:
    with torch.device("meta"):
        found = find_blocks(TutorialNet())
        assert find_blocks(TutorialNet(), wrap=100).names == ("conv1", "conv2", "fc1", "fc2")
    assert found.names == ("fc1",)
    assert "no repeated layers" in found.found


def pair() -> nn.Module:
    return nn.ModuleList([nn.Sequential(nn.Linear(2, 2)), Layer(3)])


def deep() -> nn.Module:
    return nn.Sequential(*(nn.Sequential(Layer(3), Layer(3)) for _ in range(2)))


def twice(layer: nn.Module) -> nn.Module:
    return nn.ModuleDict({"layers": nn.ModuleList([layer, layer, Layer(3)])})


SMALL = nn.ModuleDict({"a": nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), "b": nn.Linear(2, 2)})
NESTED = nn.ModuleDict({"layers": nn.ModuleList([pair(), pair()])})
FOUND = {
    # Two linears of 6 parameters are too small alone; together they reach the limit.
    "a parent of small modules that are large together": (SMALL, 12, ("a",)),
    "attention, which does not call its projection": (
        nn.ModuleDict({"attention": nn.MultiheadAttention(8, 2)}), 1, ("attention",),
    ),
    "members of nested lists, which are never called": (
        NESTED, None, ("layers.0.0", "layers.0.1", "layers.1.0", "layers.1.1"),
    ),
    "the outermost repeated modules": (deep(), None, ("0", "1")),
    "the outermost repeated modules of a part": (
        nn.ModuleDict({"body": deep()}), None, ("body.0", "body.1"),
    ),
    "a layer that is used repeatedly, once": (twice(Layer(3)), None, ("layers.0", "layers.2")),
    "inner modules before outer ones": (
        Gpt(num_layers=1), ["Layer", "Attention"], ("layers.0.attention", "layers.0"),
    ),
    "none, as given": (Gpt(), [], ()),
    "modules of a conv net by size": (ConvNet(), None, ("fc1",)),  # 240 x 90 parameters exceed the limit
}  # fmt: skip


@pytest.mark.parametrize(("model", "wrap", "names"), FOUND.values(), ids=FOUND)
def test_the_blocks_are(model: nn.Module, wrap: Any, names: tuple[str, ...]) -> None:
    assert find_blocks(model, wrap=wrap).names == names


def test_modules_that_share_a_parameter_or_a_child_stay_with_the_root() -> None:
    model: Any = Gpt()
    model.layers[1].norm.weight = model.norm.weight
    found = find_blocks(model)
    assert found.names == ("layers.0", "layers.2")
    assert found.left == ("layers.1",)
    model = Gpt()
    model.layers[0].norm = model.layers[2].norm
    assert find_blocks(model).names == ("layers.1",)


def test_without_repeated_layers_the_no_split_modules_are_blocks() -> None:
    model: Any = nn.ModuleDict({"only": Layer(3)})
    model._no_split_modules = ["Layer"]
    assert find_blocks(model).names == ("only",)


@pytest.mark.parametrize(
    "wrap", [Layer, "Layer", ["Layer"], "layers.*", ["layers.0", "layers.1", "layers.2"]], ids=str
)
def test_blocks_can_be_given_by_class_or_name_and_as_modules(wrap: Any) -> None:
    model = Gpt()
    assert find_blocks(model, wrap=wrap).names == ("layers.0", "layers.1", "layers.2")
    assert find_blocks(model, wrap=model.layers[1]).names == ("layers.1",)


@pytest.mark.parametrize(
    ("wrap", "message"),
    [
        ("Block", "no such module. Its classes are .*Layer"),
        ([Layer, nn.LSTM], "wrap= has LSTM"),
        ("layers", "never called"),
        (0, "at least 1"),
        (True, "must be classes"),
        (["Layer", 3], "must be classes"),
    ],
)
def test_invalid_blocks_are_rejected(wrap: Any, message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        find_blocks(Gpt(), wrap=wrap)


@st.composite
def trees(draw: st.DrawFn) -> nn.Module:
    """Draw module trees, some with shared members."""
    pool: list[nn.Module] = [nn.Linear(2, 3), Layer(3), nn.ReLU()]

    def grow(depth: int) -> nn.Module:
        if depth == 0 or draw(st.booleans()):
            is_shared, kind = draw(st.booleans()), draw(st.sampled_from([Layer, nn.Flatten]))
            return pool[draw(st.integers(0, 2))] if is_shared else kind(3)
        kind = draw(st.sampled_from([nn.ModuleList, nn.Sequential]))
        members = [grow(depth - 1) for _ in range(draw(st.integers(1, 3)))]
        return nn.ModuleList(members) if kind is nn.ModuleList else nn.Sequential(*members)

    return nn.ModuleDict({"a": grow(3), "b": grow(3)})


@given(model=trees(), wrap=st.sampled_from([None, 1, 10, 40]))
def test_no_parameter_is_in_two_separate_units(model: nn.Module, wrap: int | None) -> None:
    """Otherwise FSDP would raise in the first forward pass, or train it unsharded."""
    names = find_blocks(model, wrap=wrap).names
    blocks = [model.get_submodule(name) for name in names]
    assert len({id(block) for block in blocks}) == len(blocks)
    for block in blocks:
        assert type(block).forward is not nn.Module.forward
    for a, b in itertools.combinations(blocks, 2):
        if set(a.parameters()) & set(b.parameters()):
            assert a in set(b.modules()) or b in set(a.modules())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "options", "block"),
    [
        ("BertForQuestionAnswering", {}, "BertLayer"),
        ("GPT2LMHeadModel", {}, "GPT2Block"),
        ("LlamaForCausalLM", {"num_hidden_layers": 2}, "LlamaDecoderLayer"),
        ("ViTForImageClassification", {}, "ViTLayer"),
        ("DistilBertForSequenceClassification", {}, "TransformerBlock"),
        ("MixtralForCausalLM", {"num_hidden_layers": 2}, "MixtralDecoderLayer"),
        ("WhisperForConditionalGeneration", {}, "WhisperEncoderLayer"),
        ("ResNetForImageClassification", {}, "ResNetStage"),
    ],
)
def test_layers_of_transformers_models_are_found_on_meta(
    name: str, options: dict[str, Any], block: str
) -> None:
    import transformers

    kind: Any = getattr(transformers, name)
    with torch.device("meta"):
        model = kind(kind.config_class(**options))
    assert kinds(model, find_blocks(model).names)[block] >= 2


@given(ranks=st.integers(1, 512), shards=st.integers(-3, 600))
def test_shards_must_divide_the_ranks(ranks: int, shards: int) -> None:
    if shards < 1 or ranks % shards:
        with pytest.raises(InvalidInput, match=f"shards={shards} does not divide {ranks} rank"):
            make_mesh_layout(shards, ranks)
        return
    layout = make_mesh_layout(shards, ranks)
    assert layout.copies * layout.shards == ranks
    assert math.prod(layout.mesh_shape) == ranks
    assert len(layout.mesh_names) == len(layout.mesh_shape)
    assert layout.mesh_shape[-1] == (ranks if layout.copies == 1 else shards)


@pytest.mark.parametrize("wrong", [True, 2.0, "two", None, 4])
def test_other_shards_are_rejected_with_the_valid_ones(wrong: Any) -> None:
    assert make_mesh_layout("all", 6).shards == 6
    message = "may be 1, 2, 3, 6, or 'all'" if wrong == 4 else "number of ranks or 'all'"
    with pytest.raises(InvalidInput, match=message):
        make_mesh_layout(wrong, 6)


@pytest.mark.parametrize(
    ("ranks", "shards", "reshard_after_forward", "text"),
    [
        (1, 1, True, "on 1 rank, not sharded"),
        (4, 1, True, "replicated on 4 ranks (DDP)"),
        (4, 4, True, "sharded over 4 ranks (ZeRO-3)"),
        (4, 4, False, "sharded over 4 ranks (ZeRO-2)"),
        (8, 4, True, "on 8 ranks: 2 copies, each sharded over 4 (hybrid ZeRO-3)"),
    ],
)
def test_a_layout_is_described_with_common_names(
    ranks: int, shards: int, reshard_after_forward: bool, text: str
) -> None:
    assert make_mesh_layout(shards, ranks).describe(reshard_after_forward=reshard_after_forward) == text


GLOO = {"cpu": "gloo", "cuda": "gloo"}
NCCL = {"cuda": "nccl"}
BOTH = {"cpu": "gloo", "cuda": "nccl"}


@pytest.mark.parametrize(
    ("requested", "accelerator", "backends", "chosen"),
    [
        (None, None, GLOO, "cpu"),
        (None, "cuda", NCCL, "cuda"),
        (None, "cuda", BOTH, "cuda"),
        ("cpu", "cuda", BOTH, "cpu"),
        ("cpu", "cuda", GLOO, "cpu"),
        ("cuda", "cuda", BOTH, "cuda"),
    ],
)
def test_the_accelerator_is_chosen_if_the_group_supports_it(
    requested: str | None, accelerator: str | None, backends: dict[str, str], chosen: str
) -> None:
    assert choose_device(requested, accelerator, backends) == chosen


@pytest.mark.parametrize(
    ("requested", "accelerator", "backends", "message"),
    [
        (None, "cuda", GLOO, 'has only the gloo backend.*device="cpu"'),
        ("cuda", "cuda", GLOO, "has only the gloo backend"),
        ("cuda", None, GLOO, "this machine has no accelerator"),
        ("xpu", "cuda", BOTH, "this machine has cuda"),
        ("cpu", "cuda", NCCL, "does not support tensors on cpu .*cuda:nccl"),
    ],
)
def test_a_group_that_does_not_support_the_device_is_rejected(
    requested: str | None, accelerator: str | None, backends: dict[str, str], message: str
) -> None:
    with pytest.raises(InvalidInput, match=message):
        choose_device(requested, accelerator, backends)
