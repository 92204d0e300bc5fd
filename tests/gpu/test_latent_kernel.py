"""Latent attention on a GPU: the kernel over pages of narrow vectors, and steps that are CUDA graphs because of it."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, DeepseekV3Config

from tests import vlm_models
from tests.engine_models import LATENT, answers_of, requests_of, tokens_of
from tests.gpu.test_serving import extension_of, random_tensor
from trimaran.core import ModelSection
from trimaran.nets import AttentionOptions, PagedCache, PagedExtension, attend_gathered_pages
from trimaran.serve import BatchingEngine, EngineSettings, GraphRunner, RunnerTraits
from trimaran.train import load_trained

pytestmark = pytest.mark.gpu

GPU = torch.device("cuda")
BF16, FP32 = torch.bfloat16, torch.float32
V3, V2_LITE, SMALL = (128, 512, 64), (16, 512, 64), (5, 8, 4)  # heads, rank of the latent vector, rotated features
MAX_ERROR = {BF16: 8e-3, FP32: 3e-5}  # of each query and head; bf16 rounds weights and results, each by 2e-3 at most
PADDING = 3  # sequences and tokens that a CUDA graph has in surplus


def as_graph(extension: PagedExtension) -> PagedExtension:
    """Return the same step with padded sequences, and no lengths on the host, as a CUDA graph has it."""
    last = extension.query_starts[-1:].expand(PADDING)
    zeros = torch.zeros_like(last)
    decodes = extension.num_decodes if extension.num_decodes == len(extension.key_lengths) else -PADDING
    return replace(
        extension,
        page_tables=torch.cat((extension.page_tables, zeros[:, None].expand(-1, extension.page_tables.shape[1]))).int(),
        context_lengths=torch.cat((extension.context_lengths, zeros)).int(),
        query_starts=torch.cat((extension.query_starts, last)).int(),
        query_lengths=(), key_lengths=(), num_decodes=decodes + PADDING,
    )  # fmt: skip


def check(
    extension: PagedExtension, shape: tuple[int, int, int], dtype: torch.dtype, options: AttentionOptions
) -> None:
    """Compare the kernel with fp64 over gathered pages. Pages are full of random numbers beyond each sequence."""
    from trimaran.nets import attend_latent_pages  # noqa: PLC0415 - only a GPU has Triton

    (heads, rank, rope), tokens = shape, sum(extension.query_lengths)
    pages = random_tensor(extension.cache.num_pages + 1, 16, 1, rank + rope, seed=1, dtype=dtype)
    query = random_tensor(heads, tokens + PADDING, rank + rope, seed=2, dtype=dtype)
    found = attend_latent_pages(query, pages, as_graph(extension), options, rank=rank)
    assert not found[:, tokens:].any()
    memory = pages.double()
    new = memory.flatten(0, 1)[extension.slots].transpose(0, 1)[None]
    values = memory[..., :rank].contiguous()
    exact = query[None, :, :tokens].double()
    expected = attend_gathered_pages(exact, new, new[..., :rank], (memory, values), extension, options)[0]
    errors = (found[:, :tokens] - expected).norm(dim=-1) / expected.norm(dim=-1)
    assert errors.max() < MAX_ERROR[dtype]


@pytest.mark.parametrize(
    ("shape", "dtype"), [(V3, BF16), (V2_LITE, BF16), (V2_LITE, FP32), (SMALL, BF16), (SMALL, FP32)], ids=str
)
def test_the_kernel_attends_to_the_pages_of_each_sequence(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    options = AttentionOptions(scale=(shape[1] // 4 + shape[2]) ** -0.5)
    check(extension_of([1] * 7, [1, 17, 5000, 255, 256, 257, 2049]), shape, dtype, options)
    check(extension_of([1, 1, 1, 9, 30, 61, 2], [33, 1, 700, 9, 300, 61, 2049]), shape, dtype, options)


def test_windows_limit_the_keys() -> None:
    extension, options = extension_of([1, 1, 33, 7], [90, 3000, 120, 700]), AttentionOptions(scale=0.1, window=100)
    check(extension, SMALL, BF16, options)


def test_graphs_of_dense_latent_attention_in_fp32_answer_as_transformers(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(DeepseekV3Config(**LATENT | {"first_k_dense_replace": 2}))
    vlm_models.perturb(model)
    model.save_pretrained(tmp_path)
    prompts = [
        tuple((7 * number + 3 * each + 1) % 96 for number in range(length)) for each, length in enumerate((1, 5, 30))
    ]
    model.to(GPU).eval()
    model.generation_config.eos_token_id = None
    expected = {}
    for each, prompt in enumerate(prompts):
        ids = torch.tensor([prompt], device=GPU)
        answer = model.generate(ids, max_new_tokens=12, do_sample=False, pad_token_id=0)
        expected[str(each)] = answer[0, len(prompt) :].tolist()
    network = load_trained(ModelSection(family="decoder", path=str(tmp_path)), tmp_path, GPU)
    runner = GraphRunner(network, GPU, FP32, PagedCache(64, 8), RunnerTraits())
    engine = BatchingEngine(runner, EngineSettings(max_running=4, max_step_tokens=16))
    found = tokens_of(answers_of(engine, requests_of(prompts, [12] * len(prompts))))
    assert runner.captures
    assert found == expected
