"""Serving on a GPU: the kernels over pages, decode steps as CUDA graphs, and quantised weights."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from trimaran.nets.paged_cache import AttentionOptions, PagedCache, PagedExtension, attend_gathered_pages

pytestmark = pytest.mark.gpu

GPU = torch.device("cuda")
PAGE = 16
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
    from trimaran.nets.kernels.paged_attention import store_and_attend  # noqa: PLC0415 - only a GPU has Triton

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
    from trimaran.nets.kernels.paged_attention import attend_one_query  # noqa: PLC0415

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
