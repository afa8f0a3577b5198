"""Training of a tiny model by a Trainer: `train.py OUTPUT_DIR JSON`. Prints the end of the run as JSON.

Members of the JSON, all optional: `arguments` of TrainingArguments, `resume`, `stock` (without Holdfast),
`attach` (its options), `batches` (samples in a step; those used are logged), `kind` ("gpt", "peft" or
"sft"), `kill_at` with `signal`, `rank` and `is_saved` (after the save of that step), `stop_early`
(patience in evaluations), and `kill_before` (the number of a change of files).
"""

# TRL and datasets are not in every environment.
# pyright: reportMissingImports=false

from __future__ import annotations

import json
import os
import random
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from transformers import (
    EarlyStoppingCallback,
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from adapters.digest import digest
from kills import kill_before_change

warnings.simplefilter("ignore", FutureWarning)
transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()
VOLATILE = ("runtime", "per_second", "train_loss")
"""Parts of log entries that are measurements of time, or about one start only."""


class Numbers(torch.utils.data.Dataset[dict[str, Any]]):
    """Sixty-four rows of eight tokens."""

    def __init__(self, has_index: bool = False) -> None:
        self.has_index = has_index

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, Any]:
        if self.has_index:
            return {**Numbers()[index], "index": index}
        row = torch.randint(0, 50, (8,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": row, "labels": row.clone()}


class LoggingTrainer(Trainer):
    """Trainer that appends step and samples of each batch that it trains on to a file."""

    def training_step(self, model: Any, inputs: Any, *rest: Any, **options: Any) -> Any:
        samples = " ".join(str(one) for one in inputs.pop("index").tolist())
        with (Path(str(self.args.output_dir)) / "samples").open("a") as out:
            out.write(f"{self.state.global_step} {samples}\n")
        return super().training_step(model, inputs, *rest, **options)


class Killer(TrainerCallback):
    """Callback that sends this process a signal when it has computed a step, before or after its save."""

    def __init__(self, step: int, number: int, *, is_saved: bool) -> None:
        self.step, self.number, self.is_saved = step, number, is_saved

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step and not self.is_saved:
            os.kill(os.getpid(), self.number)

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step and self.is_saved:
            os.kill(os.getpid(), self.number)


def make_model(kind: str) -> Any:
    torch.manual_seed(0)
    shape: Any = {"vocab_size": 50, "n_positions": 8, "n_embd": 16, "n_layer": 1, "n_head": 2}
    model = GPT2LMHeadModel(GPT2Config(**shape, bos_token_id=1, eos_token_id=1))
    if kind == "peft":
        from peft import LoraConfig, get_peft_model

        return get_peft_model(model, LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True))
    return model


def make_trainer(output_dir: str, plan: dict[str, Any]) -> Trainer:
    arguments = {
        **{"output_dir": output_dir, "max_steps": 20, "save_steps": 4, "per_device_train_batch_size": 4},
        **{"logging_steps": 3, "use_cpu": True, "report_to": [], "seed": 0, "disable_tqdm": True},
        **plan.get("arguments", {}),
    }
    kind = plan.get("kind", "gpt")
    callbacks: list[TrainerCallback] = []
    if "kill_at" in plan and plan.get("rank", 0) == int(os.environ.get("RANK", 0)):
        callbacks = [Killer(plan["kill_at"], plan.get("signal", 9), is_saved=plan.get("is_saved", False))]
    if "stop_early" in plan:
        callbacks.append(EarlyStoppingCallback(plan["stop_early"]))
    if kind == "sft":
        from trl.trainer.sft_config import SFTConfig
        from trl.trainer.sft_trainer import SFTTrainer

        rows = [{"input_ids": Numbers()[index]["input_ids"].tolist()} for index in range(64)]
        from datasets import Dataset

        options: Any = {"args": SFTConfig(**arguments), "train_dataset": Dataset.from_list(rows)}
        return SFTTrainer(make_model(kind), callbacks=callbacks, processing_class=_tokenizer(), **options)
    has_index = "batches" in plan
    if has_index:
        if os.environ.get("RANK", "0") == "0":
            Path(output_dir).mkdir(parents=True, exist_ok=True)
            with (Path(output_dir) / "samples").open("a") as out:
                out.write("start\n")
        arguments["remove_unused_columns"] = False
    return (LoggingTrainer if has_index else Trainer)(
        make_model(kind),
        TrainingArguments(**arguments),
        train_dataset=Numbers(has_index),
        eval_dataset=Numbers() if "eval_strategy" in arguments else None,
        callbacks=callbacks,
    )


def _tokenizer() -> Any:
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    vocabulary = {f"t{index}": index for index in range(50)}
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(vocabulary, unk_token="t0")),
        pad_token="t0",
        eos_token="t1",
    )


def make_batches(plan: dict[str, Any], trainer: Any) -> Any:
    if "batches" not in plan:
        return None
    from holdfast.train.data import GlobalBatches

    accumulation_steps = trainer.args.gradient_accumulation_steps
    return GlobalBatches(len(trainer.train_dataset), plan["batches"], accumulation_steps=accumulation_steps)


def end_of(trainer: Any) -> dict[str, Any]:
    """Return everything that an interrupted run has to have in common with an unbroken one."""
    optimizer = getattr(trainer.optimizer, "optimizer", trainer.optimizer)
    log = [
        {key: value for key, value in entry.items() if not any(one in key for one in VOLATILE)}
        for entry in trainer.state.log_history
    ]
    state = trainer.state
    return {
        "model": digest(dict(trainer.model.state_dict())),
        "optimizer": digest(optimizer.state_dict()),
        "scheduler": digest(trainer.lr_scheduler.state_dict()),
        "random": digest([torch.get_rng_state(), random.getstate(), repr(np.random.get_state())]),
        "log": log,
        "state": [
            state.global_step,
            state.epoch,
            state.total_flos,
            state.best_metric,
            state.best_global_step,
        ],
    }


def main() -> None:
    output_dir, plan = sys.argv[1], json.loads(sys.argv[2])
    trainer = make_trainer(output_dir, plan)
    if not plan.get("stock"):
        from holdfast.adapters.transformers import attach

        attach(trainer, data=make_batches(plan, trainer), **plan.get("attach", {}))
    if "kill_before" in plan:
        kill_before_change(plan["kill_before"])
    trainer.train(resume_from_checkpoint=plan.get("resume"))
    sys.stdout.write(json.dumps(end_of(trainer)) + "\n")


if __name__ == "__main__":
    main()
    if torch.distributed.is_initialized():
        from holdfast import hard_exit

        hard_exit()
