"""LlamaForCausalLM with peft's LoRA, its base in bf16 or, as in QLoRA, in NF4 by bitsandbytes."""

import torch
from benchmarks.peers.work import SEED, Work
from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM


def build_with_adapter(work: Work) -> nn.Module:
    """Return the model with random weights and an adapter on every linear layer but the head."""
    torch.manual_seed(SEED)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = LlamaForCausalLM._from_config(
            LlamaConfig(**work.model.config(work.seq_len)), dtype=torch.bfloat16, attn_implementation="sdpa"
        )
    model.config.use_cache = False
    if work.adapter.get("base") == "4bit":
        _quantize(model.model)
        model.is_loaded_in_4bit = True  # as after `from_pretrained(load_in_4bit)`
        recomputed = work.recompute == "full"
        model = prepare_model_for_kbit_training(model, use_gradient_checkpointing=recomputed)
    config = LoraConfig(
        r=work.adapter["rank"],
        lora_alpha=work.adapter["alpha"],
        lora_dropout=0.0,
        target_modules="all-linear",
        task_type="CAUSAL_LM",
    )
    return get_peft_model(model, config)


def _quantize(module: nn.Module) -> None:
    """Replace every linear layer by a bitsandbytes Linear4bit with the same weight, one at a time."""
    from bitsandbytes.nn import Linear4bit, Params4bit  # noqa: PLC0415 - not for a bf16 base

    for parent in list(module.modules()):
        for name, each in list(parent.named_children()):
            if type(each) is nn.Linear:
                packed = Linear4bit(
                    each.in_features, each.out_features, bias=False, compute_dtype=torch.bfloat16, quant_type="nf4",
                    device="meta",
                )  # fmt: skip
                packed.weight = Params4bit(
                    each.weight.data.cpu(), requires_grad=False, quant_type="nf4", compress_statistics=False
                )
                setattr(parent, name, packed.to(each.weight.device))
