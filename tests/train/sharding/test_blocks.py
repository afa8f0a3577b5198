"""Blocks are found in models of many makes; what is tied stays with the root; callers may name them."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from holdfast import InvalidInput
from holdfast.train.sharding.blocks import find_blocks
from train.sharding.models import ConvNet, Gpt, Layer, make


class TutorialNet(nn.Module):
    """The layers of the FSDP tutorial's network, in its sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 32, 3, 1), nn.Conv2d(32, 64, 3, 1)
        self.dropout1, self.dropout2 = nn.Dropout(0.25), nn.Dropout(0.5)
        self.fc1, self.fc2 = nn.Linear(9216, 128), nn.Linear(128, 10)


def kinds(model: nn.Module, names: tuple[str, ...]) -> Counter[str]:
    return Counter(type(model.get_submodule(name)).__name__ for name in names)


def test_layers_of_a_list_are_the_blocks() -> None:
    found = find_blocks(Gpt())
    assert found.names == ("layers.0", "layers.1", "layers.2")
    assert found.found == "repeated layers: Layer"


def test_a_tied_t5_has_its_layers_as_blocks_and_its_embedding_outside() -> None:
    found = find_blocks(make("t5"))
    assert found.names == ("encoder.block.0", "encoder.block.1", "decoder.block.0", "decoder.block.1")
    assert found.left == ()


def test_a_net_without_layers_is_divided_by_size_as_the_tutorial_does() -> None:
    with torch.device("meta"):
        found = find_blocks(TutorialNet())
        assert find_blocks(TutorialNet(), at=100).names == ("conv1", "conv2", "fc1", "fc2")
    assert found.names == ("fc1",)
    assert "no repeated layers" in found.found


def test_a_module_above_small_ones_is_a_block_by_what_they_leave() -> None:
    """Two linears of 6 parameters are too small alone; together they reach the limit."""
    pairs = nn.ModuleDict({"a": nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), "b": nn.Linear(2, 2)})
    assert find_blocks(pairs, at=12).names == ("a",)


def test_attention_is_never_entered_since_it_does_not_call_its_projection() -> None:
    model = nn.ModuleDict({"attention": nn.MultiheadAttention(8, 2)})
    assert find_blocks(model, at=1).names == ("attention",)


def test_members_of_lists_in_lists_are_found_since_lists_are_never_called() -> None:
    def pair() -> nn.Module:
        return nn.ModuleList([nn.Sequential(nn.Linear(2, 2)), Layer(3)])

    model = nn.ModuleDict({"layers": nn.ModuleList([pair(), pair()])})
    assert find_blocks(model).names == ("layers.0.0", "layers.0.1", "layers.1.0", "layers.1.1")


def test_the_outermost_repeated_modules_are_the_blocks() -> None:
    deep = nn.Sequential(*(nn.Sequential(Layer(3), Layer(3)) for _ in range(2)))
    assert find_blocks(deep).names == ("0", "1")
    assert find_blocks(nn.ModuleDict({"body": deep})).names == ("body.0", "body.1")


def test_a_block_that_shares_a_parameter_with_another_part_is_left_to_the_root() -> None:
    model: Any = Gpt()
    model.layers[1].norm.weight = model.norm.weight
    found = find_blocks(model)
    assert found.names == ("layers.0", "layers.2")
    assert found.left == ("layers.1",)


def test_a_module_that_two_blocks_have_in_common_leaves_both_to_the_root() -> None:
    model: Any = Gpt()
    model.layers[0].norm = model.layers[2].norm
    assert find_blocks(model).names == ("layers.1",)


def test_a_layer_that_is_used_again_and_again_is_one_block() -> None:
    layer = Layer(3)
    model = nn.ModuleDict({"layers": nn.ModuleList([layer, layer, Layer(3)])})
    assert find_blocks(model).names == ("layers.0", "layers.2")


def test_classes_that_a_model_will_not_have_split_are_blocks_where_nothing_is_repeated() -> None:
    model: Any = nn.ModuleDict({"only": Layer(3)})
    model._no_split_modules = ["Layer"]
    assert find_blocks(model).names == ("only",)


@pytest.mark.parametrize(
    "at", [Layer, "Layer", ["Layer"], "layers.*", ["layers.0", "layers.1", "layers.2"]], ids=str
)
def test_callers_may_name_blocks_by_class_or_name(at: Any) -> None:
    assert find_blocks(Gpt(), at=at).names == ("layers.0", "layers.1", "layers.2")


def test_inner_blocks_come_before_outer_ones() -> None:
    found = find_blocks(Gpt(num_layers=1), at=["Layer", "Attention"])
    assert found.names == ("layers.0.attention", "layers.0")


def test_modules_themselves_may_be_named_and_none_at_all() -> None:
    model = Gpt()
    assert find_blocks(model, at=model.layers[1]).names == ("layers.1",)
    assert find_blocks(model, at=[]).names == ()


@pytest.mark.parametrize(
    ("at", "said"),
    [
        ("Block", "no such module. It has .*Layer"),
        ([Layer, nn.LSTM], "names LSTM"),
        ("layers", "never called"),
        (0, "at least 1"),
        (True, "must name classes"),
        (["Layer", 3], "must name classes"),
    ],
)
def test_what_cannot_be_a_block_is_refused(at: Any, said: str) -> None:
    with pytest.raises(InvalidInput, match=said):
        find_blocks(Gpt(), at=at)


@st.composite
def trees(draw: st.DrawFn) -> nn.Module:
    """Modules of random shape, some with shared members."""
    pool: list[nn.Module] = [nn.Linear(2, 3), Layer(3), nn.ReLU()]

    def grow(depth: int) -> nn.Module:
        if depth == 0 or draw(st.booleans()):
            return (
                pool[draw(st.integers(0, 2))]
                if draw(st.booleans())
                else draw(st.sampled_from([Layer, nn.Flatten]))(*[3])
            )
        kind = draw(st.sampled_from([nn.ModuleList, nn.Sequential]))
        members = [grow(depth - 1) for _ in range(draw(st.integers(1, 3)))]
        return nn.ModuleList(members) if kind is nn.ModuleList else nn.Sequential(*members)

    return nn.ModuleDict({"a": grow(3), "b": grow(3)})


@given(model=trees(), at=st.sampled_from([None, 1, 10, 40]))
def test_no_parameter_is_ever_in_two_separate_units(model: nn.Module, at: int | None) -> None:
    """FSDP would raise at the first forward pass, or train it unsharded."""
    names = find_blocks(model, at=at).names
    blocks = [model.get_submodule(name) for name in names]
    assert len({id(block) for block in blocks}) == len(blocks)
    for block in blocks:
        assert type(block).forward is not nn.Module.forward
    for one, other in itertools.combinations(blocks, 2):
        if set(one.parameters()) & set(other.parameters()):
            assert one in set(other.modules()) or other in set(one.modules())


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
def test_layers_of_models_in_the_wild_are_found_on_meta(
    name: str, options: dict[str, Any], block: str
) -> None:
    import transformers

    kind: Any = getattr(transformers, name)
    with torch.device("meta"):
        model = kind(kind.config_class(**options))
    assert kinds(model, find_blocks(model).names)[block] >= 2


def test_a_small_conv_net_has_one_block_by_size() -> None:
    assert find_blocks(ConvNet()).names == ("fc1",)  # 240 x 90 parameters are more than the limit
