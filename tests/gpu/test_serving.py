"""Serving on a GPU: the kernels over pages, decode steps as CUDA graphs, and quantised weights."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from trimaran.models import PRESETS
from trimaran.nets import (
    AttentionOptions,
    Network,
    PagedCache,
    PagedExtension,
    attend_gathered_pages,
    decoder_network,
    initialise,
)
from trimaran.serve import (
    LAST,
    NOTHING,
    BatchingEngine,
    EngineBatch,
    EngineRequest,
    EngineSettings,
    GraphRunner,
    ModelRunner,
    Quantisation,
    QuantisedLinear,
    Runner,
    RunnerTraits,
    compute_in_bf16,
    quantise,
    quantise_linear,
    restored_weight,
)
from trimaran.train import Sampling

pytestmark = pytest.mark.gpu

GPU = torch.device("cuda")
PAGE = 16
SPEC = replace(PRESETS["tiny"], layers=2, hidden=256, heads=8, kv_heads=2, head_dim=32, ffn=512, max_seq_len=512)
LENGTHS = (1, 17, 64, 5000, 255, 256, 257, 1023, 3, 2049)


def random_tensor(*shape: int, seed: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator("cuda").manual_seed(seed), device=GPU).to(dtype)


def extension_of(queries: Sequence[int], lengths: Sequence[int]) -> PagedExtension:
    """Return sequences with these new tokens and keys, whose pages are in random order; those with one new token first.

    Page tables are padded with the first page, which some sequence has.
    """
    counts = [-(-length // PAGE) for length in lengths]
    cache = PagedCache(sum(counts) + 3, PAGE)
    pages = torch.randperm(cache.num_pages, generator=torch.Generator().manual_seed(1))
    tables = torch.zeros(len(lengths), max(counts), dtype=torch.long)
    positions, slots, used = [], [], 0
    for number, (new, length, count) in enumerate(zip(queries, lengths, counts, strict=True)):
        tables[number, :count] = pages[used : used + count]
        used += count
        own = torch.arange(length - new, length)
        positions.append(own)
        slots.append(tables[number, own // PAGE] * PAGE + own % PAGE)
    starts = torch.tensor([0, *queries]).cumsum(0)
    on_gpu = [each.to(GPU) for each in (torch.cat(positions)[None], torch.cat(slots), tables, torch.tensor(lengths))]
    return PagedExtension(
        cache=cache, positions=on_gpu[0], slots=on_gpu[1], page_tables=on_gpu[2], context_lengths=on_gpu[3],
        query_starts=starts.to(GPU), kept=None, query_lengths=list(queries), key_lengths=list(lengths),
        num_decodes=sum(new == 1 for new in queries),
    )  # fmt: skip


def kernel_errors(
    extension: PagedExtension, heads: tuple[int, int], width: int, dtype: torch.dtype, options: AttentionOptions
) -> tuple[float, float, float]:
    """Return the errors of the kernel and of torch's operators in `dtype`, against fp32 or fp64, and the result's norm.

    The pages are full of random numbers: what lies beyond a sequence's length must not count.
    """
    from trimaran.nets import store_and_attend  # noqa: PLC0415 - only a GPU has Triton

    tokens = sum(extension.query_lengths)
    shapes = [(1, each, tokens, width) for each in (heads[0], heads[1], heads[1])]
    new = [random_tensor(*shape, seed=seed, dtype=dtype) for seed, shape in enumerate(shapes)]
    pages = (extension.cache.num_pages + 1, PAGE, heads[1], width)
    memory = random_tensor(*pages, seed=5, dtype=dtype), random_tensor(*pages, seed=6, dtype=dtype)
    before = [each.clone() for each in memory]
    ours = store_and_attend(new[0], new[1], new[2], memory, extension, options)
    for each, old, stored in zip(memory, before, new[1:], strict=True):
        old.view(-1, heads[1], width)[extension.slots] = stored[0].transpose(0, 1)
        assert torch.equal(each, old)
    exact = torch.float64 if dtype == torch.float32 else torch.float32
    finer = [each.to(exact) for each in (*new, *memory)]
    fine_options = options if options.sinks is None else replace(options, sinks=options.sinks.to(exact))
    truth = attend_gathered_pages(finer[0], finer[1], finer[2], (finer[3], finer[4]), extension, fine_options)
    plain = attend_gathered_pages(new[0], new[1], new[2], memory, extension, options)
    return float((ours - truth).norm()), float((plain - truth).norm()), float(truth.norm())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(("heads", "width"), [((32, 8), 128), ((8, 8), 64), ((14, 2), 80), ((12, 1), 256)], ids=str)
@pytest.mark.parametrize("new", ["one", "several", "both"])
def test_the_kernel_is_as_accurate_as_torch_over_gathered_pages(
    new: str, heads: tuple[int, int], width: int, dtype: torch.dtype
) -> None:
    one = [1] * len(LENGTHS)
    several = [min(length, 2 + 53 * number) for number, length in enumerate(LENGTHS)]
    order = sorted(range(len(LENGTHS)), key=lambda number: several[number] != 1)
    several, lengths = [several[each] for each in order], [LENGTHS[each] for each in order]
    queries = {"one": one, "several": several, "both": [*one, *several]}[new]
    if new == "both":
        queries = [1] * (len(one) + several.count(1)) + [each for each in several if each > 1]
    extension = extension_of(queries, {"one": LENGTHS, "several": lengths, "both": [*LENGTHS, *lengths]}[new])
    if new == "both":
        assert 0 < extension.num_decodes < len(queries)
    error, allowed, norm = kernel_errors(extension, heads, width, dtype, AttentionOptions())
    assert error <= 2 * allowed + 1e-6 * norm


@pytest.mark.parametrize("sequences", [1, 3, 64, 256])
def test_the_keys_of_few_long_sequences_are_split(sequences: int) -> None:
    lengths = [1 + (number * 977) % 5000 for number in range(sequences)]
    lengths[0] = 5000
    error, allowed, norm = kernel_errors(
        extension_of([1] * sequences, lengths), (8, 2), 64, torch.bfloat16, AttentionOptions(scale=0.2)
    )
    assert error <= 2 * allowed + 1e-6 * norm


@pytest.mark.parametrize("option", ["window", "softcap", "sinks"])
def test_windows_soft_caps_and_sinks(option: str) -> None:
    options = {
        "window": AttentionOptions(window=100),
        "softcap": AttentionOptions(softcap=3.0),
        "sinks": AttentionOptions(sinks=torch.linspace(-2, 3, 8, device=GPU)),
    }[option]
    lengths = [3, 90, 700, 5000, 64, 120, 1000, 3000]
    extension = extension_of([1, 1, 1, 1, 33, 120, 200, 7], lengths)
    error, allowed, norm = kernel_errors(extension, (8, 2), 64, torch.bfloat16, options)
    assert error <= 2 * allowed + 1e-6 * norm
    plain, _, _ = kernel_errors(extension, (8, 2), 64, torch.bfloat16, AttentionOptions())
    assert plain != error  # the option changes the result


def test_padding_has_no_keys_and_its_output_is_zero() -> None:
    from trimaran.nets import attend_one_query  # noqa: PLC0415

    memory = tuple(random_tensor(4, PAGE, 2, 64, seed=each, dtype=torch.bfloat16) for each in (1, 2))
    for sequences in (2, 1024):  # with a split of the keys and without
        out = torch.full((sequences, 4, 64), torch.nan, dtype=torch.bfloat16, device=GPU)
        lengths = torch.zeros(sequences, dtype=torch.int32, device=GPU)
        tables = torch.zeros(sequences, 3, dtype=torch.int32, device=GPU)
        attend_one_query(
            random_tensor(sequences, 4, 64, seed=0, dtype=torch.bfloat16), (memory[0], memory[1]), tables, lengths,
            AttentionOptions(), out=out,
        )  # fmt: skip
        assert not out.any()


def small_network(dtype: torch.dtype, device: torch.device = GPU) -> Network:
    network = decoder_network(SPEC)
    initialise(network.module, seed=0, spec=SPEC)
    network.module.to(device)
    if dtype == torch.bfloat16:
        compute_in_bf16(network.module)
    return network


def step_of(queries: Sequence[int], lengths: Sequence[int], wants: Sequence[int] | None = None) -> EngineBatch:
    """Return a step of sequences with these new tokens and keys, each with its own pages in order."""
    each = -(-max(lengths) // PAGE)
    tables = np.arange(len(lengths) * each).reshape(len(lengths), each)
    owners = np.repeat(np.arange(len(lengths)), queries)
    ranges = zip(queries, lengths, strict=True)
    positions = np.concatenate([np.arange(length - new, length) for new, length in ranges])
    zeros = np.zeros(len(lengths), dtype=np.int64)
    return EngineBatch(
        tokens=(positions * 31 + owners * 7) % SPEC.vocab, positions=positions,
        query_starts=np.concatenate(([0], np.cumsum(queries))), context_lengths=np.array(lengths),
        page_tables=tables, slots=tables[owners, positions // PAGE] * PAGE + positions % PAGE,
        wants=zeros + LAST if wants is None else np.array(wants), adapters=zeros, sequences=np.arange(len(lengths)),
        finished=zeros[:0],
    )  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_graph_computes_what_the_same_step_computes_without_one(dtype: torch.dtype) -> None:
    network, cache = small_network(dtype), PagedCache(1024, PAGE)
    graphs = GraphRunner(network, GPU, dtype, cache, RunnerTraits())
    plain = ModelRunner(network, GPU, dtype, cache, RunnerTraits())
    lengths = [1, 1, 5, 40, 200, 300, 17]
    assert graphs.capture(8, 600) == 13  # decode steps of 1, 2, 4 and 8, and nine with more tokens
    prompts = step_of(lengths, lengths, [LAST, LAST, NOTHING, LAST, LAST, NOTHING, LAST])
    ordered = step_of([1, 1, 1, 1, 1, 9, 30], [2, 2, 6, 301, 18, 49, 230])
    decode = step_of([1] * 7, [3, 3, 7, 302, 19, 50, 231])
    tolerance = 2e-2 if dtype == torch.bfloat16 else 2e-5  # a padded matmul may add up in another order
    for step in (prompts, ordered, decode):
        expected = plain.run(step).logits
        found = graphs.run(step).logits
        assert found.shape == expected.shape
        assert (found - expected).norm() <= tolerance * expected.norm()


def test_a_decode_step_as_a_graph_never_synchronises() -> None:
    network, cache = small_network(torch.bfloat16), PagedCache(256, PAGE)
    runner = GraphRunner(network, GPU, torch.bfloat16, cache, RunnerTraits())
    step = step_of([1, 1, 1], [20, 3, 100])
    expected = runner.run(step).logits.clone()
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = runner.run(step).logits
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(found, expected)


def answers(runner: Runner, requests: Sequence[EngineRequest], *, together: bool) -> dict[str, list[int]]:
    """Return the tokens of each request; small steps, so that prompts are computed in parts beside other sequences."""
    engine = BatchingEngine(runner, EngineSettings(max_running=24, max_step_tokens=96))
    tokens: dict[str, list[int]] = {each.id: [] for each in requests}
    for group in [list(requests)] if together else [[each] for each in requests]:
        for each in group:
            engine.add(each)
        while engine.has_work:
            for output in engine.step():
                assert output.token is not None
                tokens[output.request].append(output.token)
    return tokens


def test_greedy_answers_in_fp32_are_the_same_alone_and_together_on_a_gpu_and_a_cpu() -> None:
    generator = np.random.default_rng(0)
    lengths = [1, 2, 15, 16, 17, 40, 100, 200, 3, 64, 31, 7]
    prompts = [tuple(generator.integers(0, SPEC.vocab, length).tolist()) for length in lengths]
    prompts += [prompts[7][:150] + prompts[5], prompts[7][:160]]  # shared prefixes
    requests = [
        EngineRequest(id=str(number), prompt=prompt, sampling=Sampling(temperature=0.0), max_tokens=12 + number)
        for number, prompt in enumerate(prompts)
    ]
    found = []
    for device in (GPU, torch.device("cpu")):
        network = small_network(torch.float32, device)
        kind = GraphRunner if device == GPU else ModelRunner
        runner = kind(network, device, torch.float32, PagedCache(200, PAGE), RunnerTraits())
        found += [answers(runner, requests, together=True), answers(runner, requests, together=False)]
    assert len(found[0]["3"]) == 15
    assert len({tuple(each) for each in found[0].values()}) > 4  # they differ between requests
    assert all(each == found[0] for each in found[1:])


@pytest.mark.parametrize(("kind", "bound"), [("fp8", 0.042), ("int8", 0.014), ("int4", 0.13)])
@pytest.mark.parametrize("tokens", [1, 17, 64, 65, 128, 300])
def test_a_quantised_layer_is_close_to_the_layer(kind: Quantisation, bound: float, tokens: int) -> None:
    layer = torch.nn.Linear(640, 272, device=GPU, dtype=torch.bfloat16)
    torch.nn.init.normal_(layer.weight)
    x = random_tensor(2, tokens, 640, seed=1, dtype=torch.bfloat16)[:1]
    exact = torch.nn.functional.linear(x.float(), layer.weight.float(), layer.bias.float())
    quantise_linear(layer, kind)
    assert isinstance(layer, QuantisedLinear)
    restored = restored_weight(layer.weight, layer.scales, layer.zeros)
    with torch.inference_mode():
        found = layer(x)
    assert found.dtype == torch.bfloat16
    assert (found - exact).norm() < bound * exact.norm()
    expected = torch.nn.functional.linear(x.float(), restored, layer.bias.float())
    rounding = 0.032 if kind == "fp8" else 0.005  # fp8 rounds the inputs, too
    assert (found - expected).norm() < rounding * expected.norm()


@pytest.mark.parametrize(("kind", "bound"), [("fp8", 0.1), ("int8", 0.03), ("int4", 0.3)])
def test_a_quantised_network_is_close_to_the_network_with_graphs_and_without(kind: Quantisation, bound: float) -> None:
    network, cache = small_network(torch.bfloat16), PagedCache(256, PAGE)
    prompts, decode = step_of([70, 9, 90], [70, 9, 90]), step_of([1, 1, 1], [71, 10, 91])
    plain = ModelRunner(network, GPU, torch.bfloat16, cache, RunnerTraits())
    expected = [plain.run(step).logits for step in (prompts, decode)]
    before = sum(each.nbytes for each in network.module.parameters())
    quantise(network, kind, GPU)
    assert sum(each.nbytes for each in network.module.parameters()) < before
    for runner in (plain, GraphRunner(network, GPU, torch.bfloat16, cache, RunnerTraits())):
        for step, logits in zip((prompts, decode), expected, strict=True):
            found = runner.run(step).logits
            assert 0 < (found - logits).norm() < bound * logits.norm()
