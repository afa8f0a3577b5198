"""From answers in a text to positions of tokens, back again, and how good an answer is."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from questions import Question

MAX_ANSWER = 60  # tokens
NUM_BEST = 20  # beginnings and ends that are combined


@dataclass(frozen=True)
class Features:
    """Questions as a model takes them. A long text becomes several windows, each with its question."""

    inputs: dict[str, torch.Tensor]  # each [windows, tokens]
    starts: torch.Tensor  # [windows]: where the answer begins; 0, the class token, if it is not in the window
    ends: torch.Tensor
    questions: list[int]  # of each window
    offsets: list[list[tuple[int, int] | None]]  # of each token in the text; None outside it

    def __len__(self) -> int:
        return len(self.questions)


def features_of(
    questions: Sequence[Question], tokenizer: Callable[..., Any], *, length: int, stride: int
) -> Features:
    """Windows of `length` tokens that overlap by `stride`, as the guide's script cuts them."""
    encoded = tokenizer(
        [one.text for one in questions],
        [one.context for one in questions],
        truncation="only_second",
        max_length=length,
        stride=stride,
        return_overflowing_tokens=True,
        return_offsets_mapping=True,
        padding="max_length",
    )
    numbers = list(encoded["overflow_to_sample_mapping"])
    starts, ends, offsets = [], [], []
    for window, number in enumerate(numbers):
        in_text = encoded.sequence_ids(window)
        spans = [
            tuple(span) if part == 1 else None
            for span, part in zip(encoded["offset_mapping"][window], in_text, strict=True)
        ]
        start, end = _tokens_of(questions[number], spans)
        starts.append(start)
        ends.append(end)
        offsets.append(spans)
    inputs = {
        name: torch.tensor(encoded[name])
        for name in ("input_ids", "token_type_ids", "attention_mask")
        if name in encoded
    }
    return Features(inputs, torch.tensor(starts), torch.tensor(ends), numbers, offsets)


def _tokens_of(question: Question, spans: Sequence[tuple[int, int] | None]) -> tuple[int, int]:
    """First and last token of the answer; (0, 0) if the window does not hold it whole."""
    begin, end = question.start, question.start + len(question.answers[0])
    inside = [i for i, span in enumerate(spans) if span and span[0] < end and span[1] > begin]
    if not inside:
        return 0, 0
    first, last = spans[inside[0]], spans[inside[-1]]
    assert first
    assert last
    return (inside[0], inside[-1]) if first[0] <= begin and last[1] >= end else (0, 0)


def best_answers(
    questions: Sequence[Question], features: Features, starts: torch.Tensor, ends: torch.Tensor
) -> list[str]:
    """For each question the likeliest stretch of its text, over all its windows.

    Args:
        questions: that the features are of.
        features: their windows.
        starts: logits [windows, tokens] of where the answer begins.
        ends: the same for where it ends.
    """
    best = [(-float("inf"), "")] * len(questions)
    for window, number in enumerate(features.questions):
        spans = features.offsets[window]
        for first in starts[window].topk(min(NUM_BEST, len(spans))).indices.tolist():
            for last in ends[window].topk(min(NUM_BEST, len(spans))).indices.tolist():
                begin, end = spans[first], spans[last]
                if not begin or not end or not 0 <= last - first < MAX_ANSWER:
                    continue
                score = float(starts[window, first] + ends[window, last])
                if score > best[number][0]:
                    best[number] = score, questions[number].context[begin[0] : end[1]]
    return [text for _, text in best]


def score(questions: Sequence[Question], said: Sequence[str]) -> dict[str, float]:
    """Exact match and F1 in percent, as SQuAD's own script counts them."""
    exact = [
        max(float(_plain(text) == _plain(right)) for right in one.answers)
        for one, text in _pairs(questions, said)
    ]
    overlap = [max(_f1(text, right) for right in one.answers) for one, text in _pairs(questions, said)]
    return {
        "exact_match": 100 * sum(exact) / max(1, len(exact)),
        "f1": 100 * sum(overlap) / max(1, len(overlap)),
    }


def _pairs(questions: Sequence[Question], said: Sequence[str]) -> list[tuple[Question, str]]:
    return list(zip(questions, said, strict=True))


def _plain(text: str) -> str:
    """Without case, punctuation, articles and more than one space."""
    text = "".join(letter for letter in text.lower() if letter not in string.punctuation)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", text).split())


def _f1(said: str, right: str) -> float:
    ours, theirs = _plain(said).split(), _plain(right).split()
    common = sum((Counter(ours) & Counter(theirs)).values())
    if not ours or not theirs or not common:
        return float(ours == theirs)
    precision, recall = common / len(ours), common / len(theirs)
    return 2 * precision * recall / (precision + recall)
