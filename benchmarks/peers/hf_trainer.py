"""transformers' Trainer with LlamaForCausalLM or Qwen2VLForConditionalGeneration: bf16 autocast, compiled, fused AdamW.

Nothing is logged, saved or read between the steps, so the host never waits for the device.
"""

import tempfile
from collections.abc import Callable
from typing import Any

import accelerate
import torch
import transformers
from benchmarks.peers.hf_vlm import ImageRows, build_vlm, collate
from benchmarks.peers.timer import Timer
from benchmarks.peers.work import BETAS, CLIP, LR, SEED, WEIGHT_DECAY, Work, draw_row
from torch import Tensor
from torch.utils.data import Dataset
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

VERSION = f"transformers {transformers.__version__}, accelerate {accelerate.__version__}"


class Rows(Dataset):
    """Our tokens; the model shifts the labels itself."""

    def __init__(self, work: Work) -> None:
        self.work = work

    def __len__(self) -> int:
        return self.work.all_steps * self.work.rows_per_step

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        row = torch.from_numpy(draw_row(self.work, index)[:-1])
        return {"input_ids": row, "labels": row}


class Marks(TrainerCallback):
    def __init__(self, timer: Timer) -> None:
        self.timer = timer

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.timer.step()


class KeepingTrainer(Trainer):
    """The Trainer, which also keeps the loss of every step on the device."""

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        loss = super().training_step(*args, **kwargs)
        self.kept.append(loss.detach())
        return loss

    def train(self, *args: Any, **kwargs: Any) -> Any:
        self.kept: list[Tensor] = []
        return super().train(*args, **kwargs)


def build(work: Work) -> PreTrainedModel:
    """Return the model with random fp32 weights, on the GPU if there is one."""
    torch.manual_seed(SEED)
    config = work.model.config(work.seq_len)
    kind, config_kind = (Qwen3MoeForCausalLM, Qwen3MoeConfig) if work.model.experts else (LlamaForCausalLM, LlamaConfig)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = kind._from_config(config_kind(**config), dtype=torch.float32, attn_implementation="sdpa")
    model.config.use_cache = False
    return model


def ready(work: Work) -> Callable[[Timer], dict[str, Any]]:
    return lambda timer: _train(work, timer)


def _train(work: Work, timer: Timer) -> dict[str, Any]:
    if work.adapter:
        from benchmarks.peers.hf_adapter import build_with_adapter  # noqa: PLC0415 - only this contest needs peft

        parts: dict[str, Any] = {"model": build_with_adapter(work), "train_dataset": Rows(work)}
    elif work.model.vision is None:
        parts = {"model": build(work), "train_dataset": Rows(work)}
    else:
        parts = {"model": build_vlm(work), "train_dataset": ImageRows(work), "data_collator": collate}
    with tempfile.TemporaryDirectory() as folder:
        trainer = KeepingTrainer(args=arguments(work, folder), callbacks=[Marks(timer)], **parts)
        trainer.train()
    # With several micro-batches each one's loss is its share of the mean over all tokens.
    losses = [sum(each.item() for each in part) for part in _first_and_last(trainer.kept, work.grad_accum)]
    return {"first_loss": losses[0], "last_loss": losses[1], "version": VERSION}


def _first_and_last(kept: list[Tensor], size: int) -> tuple[list[Tensor], list[Tensor]]:
    return kept[:size], kept[-size:]


def arguments(work: Work, folder: str) -> TrainingArguments:
    on_gpu = torch.cuda.is_available()
    return TrainingArguments(
        output_dir=folder,
        max_steps=work.all_steps,
        per_device_train_batch_size=work.micro_batch,
        gradient_accumulation_steps=work.grad_accum,
        ddp_backend="gloo" if work.ranks > 1 and not on_gpu else None,
        ddp_find_unused_parameters=False if work.ranks > 1 else None,
        use_liger_kernel=bool(work.options.get("liger")),
        learning_rate=LR,
        weight_decay=WEIGHT_DECAY,
        adam_beta1=BETAS[0],
        adam_beta2=BETAS[1],
        max_grad_norm=CLIP,
        bf16=work.precision == "bf16",
        optim="adamw_torch_fused",
        torch_compile=work.compile,
        gradient_checkpointing=work.recompute == "full",
        use_cpu=not on_gpu,
        dataloader_num_workers=0,
        dataloader_pin_memory=on_gpu,
        remove_unused_columns=False,
        logging_strategy="no",
        logging_nan_inf_filter=False,  # it would synchronise at each step
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        seed=SEED,
    )
