"""Model and tokenizer: pretrained ones from the Hugging Face Hub, or small untrained ones."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from typing import Any

from tokenizers import Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import WordPiece
from transformers import (
    AutoModelForQuestionAnswering,
    AutoTokenizer,
    BertConfig,
    BertForQuestionAnswering,
    PreTrainedTokenizerFast,
)

SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
NUM_WORDS = 2000


def make(name: str, texts: Iterable[str], *, length: int) -> tuple[Any, Any]:
    """Return a question-answering model and its tokenizer.

    Args:
        name: "small", or a model of the Hugging Face Hub, such as "bert-base-uncased".
        texts: the small tokenizer's vocabulary is made from their words.
        length: maximum length of an input, in tokens.
    """
    if name != "small":
        return AutoModelForQuestionAnswering.from_pretrained(name), AutoTokenizer.from_pretrained(name)
    tokenizer = small_tokenizer(texts)
    config = BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=128,
        max_position_embeddings=length,
        hidden_dropout_prob=0.05,
        attention_probs_dropout_prob=0.0,
        initializer_range=0.1,  # the usual 0.02 is for much wider models
    )
    return BertForQuestionAnswering(config), tokenizer


def small_tokenizer(texts: Iterable[str]) -> PreTrainedTokenizerFast:
    """Return a WordPiece tokenizer whose vocabulary has the most frequent words of `texts`.

    The vocabulary must be the same at every start of the training, because rows of the embedding belong to
    its tokens. Counting words is deterministic; the trainer of `tokenizers` is not.
    """
    counts = Counter(word for text in texts for word in re.findall(r"[a-z]+|[0-9]|[^\sa-z0-9]", text.lower()))
    letters = sorted({letter for word in counts for letter in word})
    common = sorted((word for word in counts if len(word) > 1), key=lambda word: (-counts[word], word))
    words = common[:NUM_WORDS]
    tokens = [*SPECIAL, *letters, *words, *(f"##{token}" for token in (*letters, *words))]
    vocabulary = {token: number for number, token in enumerate(dict.fromkeys(tokens))}
    tokenizer = Tokenizer(WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    ends = [(one, vocabulary[one]) for one in ("[CLS]", "[SEP]")]
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=ends
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="[UNK]",
        pad_token="[PAD]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        mask_token="[MASK]",
        model_input_names=["input_ids", "token_type_ids", "attention_mask"],
    )
