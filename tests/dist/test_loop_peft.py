"""A model with frozen parameters from peft trains in a user's own loop as in one process, replicated and sharded."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

import trimaran
from tests.cases import slow
from tests.ranks import run_ranks


def train_peft(sharding: str, dtype: torch.dtype) -> tuple[list[float], list[str]]:
    """Return losses of a tiny Llama with LoRA by peft, and the names of what the optimizer has states of."""
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2,
        vocab_size=64, max_position_embeddings=32,
    )  # fmt: skip
    base: Any = LlamaForCausalLM(config)
    base.to(dtype)
    model = get_peft_model(base, LoraConfig(r=2, target_modules=["q_proj", "v_proj"]))
    trained = [each for each in model.parameters() if each.requires_grad]
    loop = trimaran.prepare(model, torch.optim.AdamW(trained, lr=1e-2), sharding=sharding)
    losses = []
    for step in range(3):
        tokens = torch.randint(64, (5, 8), generator=torch.Generator().manual_seed(step))
        for rows in loop.micro_batches({"input_ids": tokens, "labels": tokens}, size=2):
            loss = model(**rows).loss  # a mean over all but the first token
            loop.backward(loss, num_tokens=len(rows["labels"]) * 7, reduction="mean")
        losses.append(float(loop.step(clip_norm=1.0).loss))
    names = {id(each): name for name, each in model.named_parameters()}
    return losses, sorted(names[id(each)] for each in loop.optimizer.state)


@pytest.mark.parametrize(
    ("sharding", "dtype"),
    [
        ("parameters", torch.bfloat16),
        *map(slow, [("none", torch.float32), ("parameters", torch.float32)]),
    ],
)
def test_a_peft_model_trains_alike_on_ranks(sharding: str, dtype: torch.dtype) -> None:
    ((alone, names),) = run_ranks(1, train_peft, "none", dtype)
    assert len(names) == 8
    assert all("lora_" in name for name in names)
    for losses, others in run_ranks(2, train_peft, sharding, dtype):
        assert others == names
        assert losses == pytest.approx(alone, rel=1e-5 if dtype == torch.float32 else 2e-3)
