"""The model and its tokenizer: a small T5 whose words are learned here, or one from the hub by its name."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from tokenizers import Tokenizer, decoders, pre_tokenizers, processors
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer
from transformers import AutoTokenizer, PreTrainedTokenizerFast, T5Config, T5ForConditionalGeneration

NUM_WORDS = 2048


def learn_words(texts: Iterable[str]) -> str:
    """A byte-level BPE of these texts, as JSON."""
    tokenizer = Tokenizer(BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<pad>", "</s>", "<unk>"]
    trainer = BpeTrainer(vocab_size=NUM_WORDS, special_tokens=special, show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    return tokenizer.to_str()


def make_tokenizer(name: str, words: str) -> Any:
    """The tokenizer of a model: from the hub, or for the small one from what `learn_words` gave."""
    if name != "small":
        return AutoTokenizer.from_pretrained(name)
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(words), pad_token="<pad>", eos_token="</s>", unk_token="<unk>"
    )


def make_model(name: str, *, dropout: float) -> Any:
    """T5, from the hub with its weights, or a small one with random weights."""
    if name != "small":
        return T5ForConditionalGeneration.from_pretrained(name, dropout_rate=dropout)
    config = T5Config(
        vocab_size=NUM_WORDS,
        d_model=96,
        d_kv=24,
        d_ff=256,
        num_layers=2,
        num_heads=4,
        dropout_rate=dropout,
        pad_token_id=0,
        eos_token_id=1,
        use_cache=True,
    )
    config.decoder_start_token_id = 0
    return T5ForConditionalGeneration(config)
