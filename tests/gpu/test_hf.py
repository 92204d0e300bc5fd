"""Hugging Face models on a GPU: loading their weights, and our attention in them."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from transformers import AutoModelForCausalLM, LlamaConfig

from tests.hf_models import CONFIGS, SMALL, save_model
from trimaran.nets import HfNetwork, hf_network, open_hf_model

pytestmark = pytest.mark.gpu

TOKENS = torch.randint(0, 96, (2, 24), generator=torch.Generator().manual_seed(1))
DOCUMENTS = torch.arange(2).repeat_interleave(12).expand(2, 24)


def opened(folder: Path, device: str = "cuda") -> HfNetwork:
    module, fill = open_hf_model(folder, trust_remote_code=False, seed=3)
    fill(module, torch.device(device))
    return hf_network(module, None)


@pytest.mark.parametrize("name", ["llama-tied", "gemma3", "gpt2", "qwen3-moe"])
def test_weights_read_onto_a_gpu_equal_those_that_transformers_loads(name: str, tmp_path: Path) -> None:
    network = opened(save_model(name, tmp_path))
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, attn_implementation="sdpa").cuda()
    assert {each.device.type for each in (*network.module.parameters(), *network.module.buffers())} == {"cuda"}
    with torch.no_grad():
        ours, expected = network.forward({"tokens": TOKENS.cuda()})[0], theirs(TOKENS.cuda()).logits
    torch.testing.assert_close(ours, expected, atol=1e-5, rtol=1e-5)


def test_random_weights_do_not_depend_on_the_device(tmp_path: Path) -> None:
    CONFIGS["llama"].save_pretrained(tmp_path)
    here, there = (opened(tmp_path, device).module.state_dict() for device in ("cpu", "cuda"))
    assert all(torch.equal(here[name], there[name].cpu()) for name in here)


@pytest.mark.parametrize("saved", [False, True], ids=["random", "saved"])
def test_loading_allocates_no_more_gpu_memory_than_the_weights(saved: bool, tmp_path: Path) -> None:
    shape: dict[str, Any] = {
        "num_hidden_layers": 8,
        "hidden_size": 1024,
        "num_attention_heads": 8,
        "intermediate_size": 4096,
    }
    config = LlamaConfig(**SMALL | shape)
    (AutoModelForCausalLM.from_config(config) if saved else config).save_pretrained(tmp_path)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    network = opened(tmp_path)
    num_bytes = sum(each.numel() * 4 for each in network.module.parameters())
    # Weights are copied one slice of a matrix at a time.
    assert num_bytes <= torch.cuda.max_memory_allocated() - before <= 1.1 * num_bytes


@pytest.mark.parametrize("name", ["llama", "qwen3", "gpt2"])
def test_our_attention_equals_that_of_transformers_on_a_gpu(name: str, tmp_path: Path) -> None:
    theirs = AutoModelForCausalLM.from_pretrained(save_model(name, tmp_path), dtype=torch.float32).cuda()
    network = opened(tmp_path)
    packed = {"documents": DOCUMENTS.cuda(), "host_documents": DOCUMENTS}
    with torch.no_grad(), torch.autocast("cuda", dtype=torch.bfloat16):
        halves = [theirs(each).logits.float() for each in TOKENS.cuda().split(12, dim=1)]
        for more, wanted in (({}, theirs(TOKENS.cuda()).logits.float()), (packed, torch.cat(halves, dim=1))):
            found = network.forward({"tokens": TOKENS.cuda()} | more)[0].float()
            torch.testing.assert_close(found, wanted, atol=2e-2, rtol=2e-2)


class Shapes(TorchDispatchMode):
    """Records the shape of every tensor that an operator returns."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[tuple[int, ...]] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        tree_map_only(torch.Tensor, lambda each: self.seen.add(tuple(each.shape)), out)
        return out


@pytest.mark.parametrize("packed", [False, True], ids=["rows", "documents"])
def test_no_mask_is_built_and_the_host_never_synchronises(packed: bool, tmp_path: Path) -> None:
    CONFIGS["llama"].save_pretrained(tmp_path)
    network, length = opened(tmp_path), 56
    documents = (torch.arange(length) >= 20).int().expand(2, -1).contiguous()
    inputs = {"tokens": torch.arange(2 * length, device="cuda").view(2, -1) % 96}
    inputs |= {"documents": documents.cuda(), "host_documents": documents} if packed else {}

    def step() -> None:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            logits, _ = network.forward(inputs)
        logits.float().logsumexp(-1).sum().backward()

    step()  # libraries may synchronise at their first use
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with Shapes() as shapes:
            step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert not [each for each in shapes.seen if each[-2:] == (length, length)]
    assert [each for each in shapes.seen if length in each]
