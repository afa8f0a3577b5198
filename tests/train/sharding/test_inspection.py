"""`describe` shows the units of any model as a tree, with their layout and this rank's bytes."""

from __future__ import annotations

from typing import Any

import pytest

import holdfast
from elastic.conftest import Worlds
from train.sharding.models import make
from train.sharding.starts import by_hand, of_others, printed_by_shard

pytestmark = pytest.mark.ranks

OPTIONS = ("activation_checkpointing", "cpu_offload")
GPT = """\
Gpt sharded over 2 ranks (ZeRO-3), on cpu over gloo
  13,887 parameters, 55.5 kB; this rank holds 28.6 kB (51.4%) and gathers up to 19.5 kB more
  computes in bfloat16, averages gradients in float32
  offloaded to host memory, recomputed in backward
  Gpt                                 unit: 1,449 parameters, 2.9 kB of 5.8 kB here, kept after forward
  ├─ embed: Embedding                 1,407, tied to head.weight
  ├─ layers: ModuleList
  │  └─ 0-2, 3 times: Layer           unit: 4,146 parameters, 8.5 kB of 16.6 kB here, freed after forward
  ├─ norm: LayerNorm                  42
  └─ head: Linear                     0, tied to embed.weight
  note: the parameters are in host memory anyway: cpu_offload has no effect
  note: 1 buffer in another dtype (place): convert before adding to activations"""

CONV = """\
ConvNet replicated on 2 ranks (DDP), on cpu over gloo
  23,805 parameters, 95.2 kB; this rank holds 95.2 kB (100.0%) and gathers up to 95.2 kB more
  ConvNet                             unit: 1,020 parameters, 4.1 kB of 4.1 kB here, kept after forward
  ├─ conv1: Conv2d                    80
  ├─ conv2: Conv2d                    unit: 1,095 parameters, 4.4 kB of 4.4 kB here, freed after forward
  ├─ norm: GroupNorm                  30
  ├─ fc1: Linear                      unit: 21,690 parameters, 86.8 kB of 86.8 kB here, freed after forward
  └─ fc2: Linear                      910"""


@pytest.mark.fsdp2_on_cpu
@pytest.mark.parametrize(
    ("name", "options", "tree", "blocks"),
    [
        ("gpt", dict.fromkeys(OPTIONS, True) | {"dtype": "bf16"}, GPT, "repeated layers: Layer"),
        ("conv", {"wrap": 1000, "shards": 1}, CONV, "modules of at least 1,000 parameters"),
    ],
)
def test_the_tree_is_the_same_while_parameters_are_gathered(
    worlds: Worlds, name: str, options: dict[str, Any], tree: str, blocks: str
) -> None:
    (printed, after, between), (nothing, *_) = worlds(2).run(printed_by_shard, name, options)
    assert after == between == tree
    assert printed == f"holdfast: {tree}\n  blocks: {blocks}\n"
    assert nothing == ""  # only rank 0 prints


@pytest.mark.fsdp2_on_cpu
def test_a_model_sharded_by_hand_has_the_same_description_and_batch_norms_are_noted(worlds: Worlds) -> None:
    for ours, theirs, notes in worlds(2).run(by_hand):
        assert ours == theirs
        assert "3 times: Layer" in ours
        assert notes == ("1 batch norm with statistics of each rank's own batch only",)


def test_models_that_are_not_sharded_by_fsdp2_are_noted(worlds: Worlds) -> None:
    ((alone,), (ddp,), (partly,)) = worlds(2).run(of_others)[0]
    assert "not sharded" in alone
    assert ddp == "DDP: each of 2 ranks has a full copy"
    assert partly == "27 parameters outside of all units: each rank trains its own, without synchronization"


def test_a_plain_model_is_described_with_its_ties() -> None:
    text = str(holdfast.describe(make("t5")))
    assert text.startswith("T5ForConditionalGeneration: 14,955 parameters, 59.8 kB\n")
    assert "lm_head: Linear                  0, tied to shared.weight\n" in text
    assert "1,407, tied to encoder.embed_tokens.weight, decoder.embed_tokens.weight, lm_head.weight" in text
