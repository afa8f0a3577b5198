"""The second FSDP tutorial: T5 learns to sum up texts, spread over the ranks, and cannot be killed for good.

torchrun --standalone --nproc-per-node 2 examples/t5_summarize/train.py [--home DIR] [--way zero2] [--bf16]
holdfast launch examples/t5_summarize/task.yaml

Kill it whenever you like and start it again, on as many ranks as you like: it resumes where it stopped.
"""

from __future__ import annotations

import argparse
import itertools
import os
import resource
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from models import learn_words, make_model, make_tokenizer
from pairs import Tokens, read_pairs, share
from rouge_score.rouge_scorer import RougeScorer
from torch.distributed.fsdp import FSDPModule
from torch.nn import functional
from tqdm import tqdm

import holdfast
from holdfast.train.lengths import BucketBatches

WAYS: dict[str, dict[str, Any]] = {
    "zero3": {},  # the tutorial's FULL_SHARD
    "zero2": {"reshard_after_forward": False},  # SHARD_GRAD_OP
    "hybrid": {"shards": 2},  # HYBRID_SHARD
    "ddp": {"shards": 1},  # NO_SHARD
}
SCORES = ("rouge1", "rouge2", "rougeL")


def main() -> None:
    """Train, take the best checkpoint, and sum up texts that it has not seen."""
    args = read_arguments()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    if "WORLD_SIZE" in os.environ:
        dist.init_process_group("nccl" if device == "cuda" else "gloo")
    words, data = prepare(args)
    try:
        train(args, words, data, device)
    except holdfast.Preempted as notice:  # what matters is durable; the next start resumes
        holdfast.hard_exit(notice.code)
    test(args, words, data["test"], device)
    holdfast.hard_exit(0)  # a finished gloo process may otherwise be aborted by its own threads


def prepare(args: argparse.Namespace) -> tuple[str, dict[str, Tokens]]:
    """Tokens of all pairs; rank 0 reads them, and learns the words unless a checkpoint has them."""
    pairs = read_pairs(args.data, args.most) if rank() == 0 else {}
    words = ""
    if rank() == 0 and args.model == "small":
        try:
            # A row of the embedding means just this word.
            words = holdfast.open(args.home).values()["words"]
        except holdfast.NotFound:
            words = learn_words(text for pair in pairs["train"] for text in (pair.text, pair.summary))
    pairs, words = from_first((pairs, words))
    tokenizer = make_tokenizer(args.model, words)
    return words, {part: Tokens(some, tokenizer, args.longest) for part, some in pairs.items()}


def train(args: argparse.Namespace, words: str, data: dict[str, Tokens], device: str) -> None:
    """Train to the end, from the last checkpoint. The one with the best validation loss is kept too."""
    # T5's blocks return views of what they compute; neither T5 nor this file changes them in place.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view")
    torch.manual_seed(args.seed)  # every rank draws the same weights, and keeps its part
    model = make_model(args.model, dropout=args.dropout)
    dtype = "bf16" if args.bf16 else None
    holdfast.shard(model, **WAYS[args.way], dtype=dtype, activation_checkpointing=args.recompute)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    batches = BucketBatches(data["train"].lengths, args.batch, seed=args.seed)
    total = args.epochs * len(batches)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: slope(step, total))
    torch.manual_seed(args.seed + 1 + rank())  # dropout differs from rank to rank
    curve = torch.zeros(total, device=device)  # the loss of every step, of all ranks
    state: dict[str, Any] = {"model": model, "optimizer": optimizer, "schedule": schedule, "batches": batches}
    state |= {"curve": holdfast.replicated(curve), "words": words}
    stream = itertools.chain.from_iterable(batches for _ in itertools.count())
    bar = tqdm(total=total, desc="train", disable=None if rank() == 0 else True)
    keep = holdfast.Keep(last=2, best=1, metric="validation")
    with holdfast.Checkpointer(args.home, state, every=args.every, keep=keep, memory="256MiB") as ckpt:
        for step in ckpt.steps(total):
            curve[step] = train_step(model, optimizer, data["train"].batch(next(stream), device))
            schedule.step()
            bar.update(step + 1 - bar.n)
            if (step + 1) % len(batches) == 0:
                loss = validate(model, data["validation"], args.batch, device)
                mean = curve[step + 1 - len(batches) : step + 1].mean()
                report(f"epoch {(step + 1) // len(batches)}: loss {mean:.4f}, validation {loss:.4f}")
                ckpt.record(validation=loss)
                ckpt.save(step + 1)  # of just the weights that were evaluated
    bar.close()
    if args.curve and rank() == 0:
        args.curve.write_text("\n".join(map(repr, curve.tolist())))


def train_step(model: Any, optimizer: torch.optim.Optimizer, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """One step; the mean loss of all tokens of all ranks, without waiting for the device."""
    model.train()
    losses, num_tokens = summed_loss(model, batch)
    sums = all_sums(torch.stack([losses.detach(), num_tokens]))
    # Ranks have unequal numbers of tokens, and gradients are averaged over ranks: so each token counts alike.
    (losses / sums[1] * num_ranks()).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return sums[0] / sums[1]


def summed_loss(model: Any, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """The loss of this rank's tokens, added up, and how many they are."""
    inputs = {**batch, "labels": None}
    starts = model._shift_right(batch["labels"])
    logits = model(**inputs, decoder_input_ids=starts, use_cache=False).logits
    labels = batch["labels"].flatten()
    loss = functional.cross_entropy(logits.flatten(0, 1).float(), labels, reduction="sum")
    return loss, (labels >= 0).sum().float()


@torch.no_grad()
def validate(model: Any, tokens: Tokens, size: int, device: str) -> float:
    """Mean loss of all tokens that are not trained with; every sample counts once, on however many ranks."""
    model.eval()
    sums = torch.zeros(2, device=device)
    parts = share(len(tokens.pairs), rank(), num_ranks(), max(1, size // num_ranks()))
    for indices in tqdm(parts, desc="validate", leave=False, disable=None if rank() == 0 else True):
        sums += torch.stack(summed_loss(model, tokens.batch(indices, device)))
    for part in model.modules():
        if isinstance(part, FSDPModule):
            part.reshard()  # without a backward pass, what was gathered stays so
    loss, num = all_sums(sums).tolist()
    return loss / num


@torch.no_grad()
def test(args: argparse.Namespace, words: str, tokens: Tokens, device: str) -> None:
    """ROUGE of the best checkpoint, restored into a whole model on every rank; and some of its summaries."""
    model = make_model(args.model, dropout=0.0)
    best = holdfast.open(args.home, best="validation")
    best.load_into(model)
    model.to(device).eval()
    tokenizer = make_tokenizer(args.model, words)
    scorer, sums = RougeScorer(SCORES, use_stemmer=True), torch.zeros(len(SCORES))
    num = min(args.test, len(tokens.pairs))
    shown = []
    for indices in share(num, rank(), num_ranks(), args.batch):
        mine = [index for index in indices if index is not None]
        if not mine:
            continue
        batch = tokens.batch(mine, device)
        batch.pop("labels")
        written = model.generate(**batch, max_new_tokens=args.longest[1], num_beams=1, do_sample=False)
        for index, text in zip(mine, tokenizer.batch_decode(written, skip_special_tokens=True), strict=True):
            scores = scorer.score(tokens.pairs[index].summary, text)
            sums += torch.tensor([scores[name].fmeasure for name in SCORES])
            shown.append((tokens.pairs[index].summary, text.strip()))
    report(f"the best checkpoint is that of step {best.step}; it sums up texts that it has not seen:")
    for right, text in shown[:4]:
        report(f"  {text}\n    (written: {right})")
    means = all_sums(sums.to(device)).cpu() / num
    scores = ", ".join(f"{name} {100 * mean:.1f}" for name, mean in zip(SCORES, means.tolist(), strict=True))
    report(f"{num} texts: {scores}")
    report(f"peak memory of each rank: {', '.join(f'{one / 1e6:.0f} MB' for one in of_all(peak_bytes()))}")


def slope(step: int, total: int) -> float:
    """The learning rate's factor: up over the first twentieth, then down to nothing."""
    warm = max(1, total // 20)
    return min((step + 1) / warm, (total - step) / max(1, total - warm))


def peak_bytes() -> int:
    """The most memory that this process has taken: of the device, or of the host where there is none."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def report(text: str) -> None:
    """Print on rank 0, above progress bars."""
    if rank() == 0:
        tqdm.write(text)


def rank() -> int:
    """This process's number."""
    return dist.get_rank() if dist.is_initialized() else 0


def num_ranks() -> int:
    """How many train together."""
    return dist.get_world_size() if dist.is_initialized() else 1


def all_sums(values: torch.Tensor) -> torch.Tensor:
    """The same values, added up over the ranks."""
    if num_ranks() > 1:
        dist.all_reduce(values)
    return values


def from_first(value: Any) -> Any:
    """Rank 0's value, on every rank."""
    values = [value]
    if num_ranks() > 1:
        dist.broadcast_object_list(values)
    return values[0]


def of_all(value: int) -> list[int]:
    """Every rank's value."""
    values = [value] * num_ranks()
    if num_ranks() > 1:
        dist.all_gather_object(values, value)
    return values


def read_arguments() -> argparse.Namespace:
    """What the caller wants."""
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    parser.add_argument("--home", type=Path, default=Path("runs/t5"), help="folder of the checkpoints")
    parser.add_argument("--way", choices=list(WAYS), default="zero3", help="how the model is spread")
    parser.add_argument("--bf16", action="store_true", help="compute in bfloat16")
    parser.add_argument("--recompute", action="store_true", help="checkpoint activations")
    parser.add_argument("--model", default="small", help="or what the hub calls it, such as t5-base")
    parser.add_argument("--data", default="docstrings", help="or FILE.csv, or hub:OWNER/NAME/FILE.csv")
    parser.add_argument("--most", type=int, default=1500, help="pairs that are read")
    parser.add_argument("--longest", type=int, nargs=2, default=(128, 32), help="tokens of text, of summary")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--batch", type=int, default=16, help="pairs in each step, on all ranks together")
    parser.add_argument("--lr", type=float, default=4e-3)
    parser.add_argument("--dropout", type=float, default=0.1, help="with 0 any number of ranks trains alike")
    parser.add_argument("--every", type=int, default=25, help="steps between checkpoints")
    parser.add_argument("--test", type=int, default=64, help="texts that are summed up at the end")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--curve", type=Path, help="write the loss of every step here, a line each")
    return parser.parse_args()


if __name__ == "__main__":
    main()
