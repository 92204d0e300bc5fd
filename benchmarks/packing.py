"""Measures packing, bucketing and balancing on a realistic mix (`mix.py`) against random padded batches.

usage: python benchmarks/packing.py [--json RESULTS.json] [--samples 1000000]

Three tables: the fraction of padding; how much longer the slowest rank takes than the mean, for the costs of published
models; and useful tokens per second of a forward and backward of a vision-language model (0.4B language and 90M vision
parameters in bf16 on a GPU; the tiny preset in fp32 on a CPU, with everything an eighth as large). A useful token
belongs to a sample; image tokens count. The padded batches need no mask, and their patches are packed like ours: only
the text is padded. Both sides alternate, so a change of the machine's speed affects both.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from benchmarks.mix import IMAGE_TOKEN, Mix
from torch import Tensor

from trimaran.core import DataSection, ImageRules, ModelSection, RowCost
from trimaran.data.feed import DataShare, positions
from trimaran.data.row_arrays import ImageArrays, SamplePacker
from trimaran.data.row_packing import Batching, PackingRules, RowPacking, pack_samples
from trimaran.data.sample_costs import measure_samples
from trimaran.data.sample_feed import (
    SampleFeed,
    SampleFeedOptions,
    SampleRows,
    balance_rows,
    sequential_rows,
    slowest_rank_cost,
)
from trimaran.data.text.token_shards import IGNORED
from trimaran.models import outline_if_known
from trimaran.models.model_presets import PRESETS, VLM_PRESETS
from trimaran.models.outline import row_cost
from trimaran.models.vlm_spec import ProjectorSpec, VisionSpec, VlmSpec
from trimaran.nets.initial_weights import initialise
from trimaran.nets.vlm.vlm_network import vlm_network
from trimaran.train.loss.cross_entropy import summed_loss

SEQ_LEN = 4096
RULES = ImageRules(patch=14, merge=2, image_token=IMAGE_TOKEN, max_pixels=768 * 28 * 28)
PADDED_SAMPLES = 8  # per padded micro-batch
MODELS = ("qwen2-vl-2b", "qwen2-vl-7b", "internvl-26b")
Inputs = Mapping[str, Tensor]


def packing_of(mix: Mix, rules: ImageRules, batching: Batching, seq_len: int) -> RowPacking:
    packing_rules = PackingRules(seq_len=seq_len, batching=batching, images=rules)
    return pack_samples(mix, np.arange(mix.num_samples), measure_samples(mix, rules), packing_rules)


def waste_table(num_samples: int) -> list[dict[str, Any]]:
    """Return the fraction of padding of each method, and the seconds it took to pack the rows."""
    mix = Mix(num_samples)
    lengths = np.minimum(measure_samples(mix, RULES).lengths, SEQ_LEN)
    mixed = lengths[positions(0, np.arange(num_samples), num_samples)]
    groups = mixed[: num_samples // PADDED_SAMPLES * PADDED_SAMPLES].reshape(-1, PADDED_SAMPLES)
    padded = 1 - groups.sum() / (groups.max(1).sum() * PADDED_SAMPLES)
    table = [{"way": f"padded to the longest of {PADDED_SAMPLES}", "padding": padded, "seconds": 0.0}]
    for batching in ("bucket", "pack"):
        began = time.perf_counter()
        packing = packing_of(mix, RULES, batching, SEQ_LEN)
        seconds = time.perf_counter() - began
        waste = 1 - lengths[packing.samples].sum() / (len(packing) * SEQ_LEN)
        table.append({"way": batching, "padding": waste, "seconds": seconds})
    return table


def balance_table() -> list[dict[str, Any]]:
    """Return how much longer the slowest rank takes than the mean, per model and number of ranks: 512 rows per step."""
    mix = Mix(100_000)
    sample_sizes, packing = measure_samples(mix, RULES), packing_of(mix, RULES, "pack", SEQ_LEN)
    table = []
    for model in MODELS:
        outline = outline_if_known(ModelSection(family="vlm", preset=model), DataSection(seq_len=SEQ_LEN))
        assert outline is not None
        cost = row_cost(outline)
        extra_cost = sample_sizes.extra_cost(cost, SEQ_LEN)
        rows = SEQ_LEN + np.add.reduceat(extra_cost[packing.samples], packing.offsets[:-1])
        for dp in (8, 64):
            share = DataShare(rank=0, dp=dp, micro_batch=1, grad_accum=512 // dp)
            table.append({"model": model, "ranks": dp, **_balance(rows, share)})
    return table


def _balance(rows: np.ndarray, share: DataShare) -> dict[str, float]:
    ratios: dict[str, list[float]] = {"in_order": [], "dealt": [], "dealt_in_sum": []}
    seconds = []
    for step in range(16):
        batch = rows[positions(0, np.arange(512) + 512 * step, len(rows))]
        began = time.perf_counter()
        assignment = balance_rows(batch, share)
        seconds.append(time.perf_counter() - began)
        mean = batch.sum() / share.dp
        ratios["in_order"].append(slowest_rank_cost(batch, sequential_rows(share)) / mean)
        ratios["dealt"].append(slowest_rank_cost(batch, assignment) / mean)
        ratios["dealt_in_sum"].append(batch[assignment].sum((0, 2)).max() / mean)
    means = {name: statistics.mean(each) for name, each in ratios.items()}
    return means | {"worst_dealt": max(ratios["dealt"]), "milliseconds": 1000 * statistics.median(seconds)}


class Side:
    """One batching method: its micro-batches on the device, and the useful tokens of each."""

    def __init__(self, name: str, batches: list[tuple[dict[str, Tensor], int]]) -> None:
        self.name, self.batches = name, batches
        self.seconds, self.tokens = 0.0, 0

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds


def packed_side(mix: Mix, rules: ImageRules, batching: Batching, share: DataShare, seq_len: int, steps: int) -> Side:
    packing = packing_of(mix, rules, batching, seq_len)
    rows = SampleRows(mix, packing, measure_samples(mix, rules))
    feed = SampleFeed(rows, SampleFeedOptions(rules=rules, cost=RowCost(patch=0.2)), share=share)
    batches = []
    for step in range(steps):
        loaded = feed.load(step, lambda _: None)
        batch = {name: each if name in loaded.offsets else each[0] for name, each in loaded.arrays.items()}
        batches.append((_tensors(batch), int(loaded.metrics["tokens"])))
    return Side(batching, batches)


def padded_side(mix: Mix, rules: ImageRules, seq_len: int, steps: int) -> Side:
    """Return random batches, each padded to its longest sample."""
    packer, sample_sizes = SamplePacker(rules, seq_len), measure_samples(mix, rules)
    fitting = np.flatnonzero(sample_sizes.lengths <= seq_len)
    order = fitting[positions(1, np.arange(steps * PADDED_SAMPLES), len(fitting))]
    batches = []
    for ids in order.reshape(steps, PADDED_SAMPLES).tolist():
        images = ImageArrays(mix, rules, int(sample_sizes.patches[ids].sum()), None)
        samples = []
        for each in ids:
            numbers = range(*mix.first_image[each : each + 2].tolist())
            samples.append(packer.pack(mix.sample(each), mix.image_sizes[numbers.start : numbers.stop]))
            images.append(numbers, samples[-1].grids)
        longest = max(map(len, samples))
        tokens, labels = np.zeros((len(ids), longest), dtype=np.int64), np.full((len(ids), longest), IGNORED)
        for row, sample in enumerate(samples):
            tokens[row, : len(sample)], labels[row, : len(sample)] = sample.tokens, sample.labels
        arrays = {"tokens": tokens, "labels": labels, **images.arrays()}
        batches.append((_tensors(arrays), sum(map(len, samples))))
    return Side(f"padded to the longest of {PADDED_SAMPLES}", batches)


def _tensors(arrays: Mapping[str, np.ndarray]) -> dict[str, Tensor]:
    """Return tensors on the device. Documents and grids also stay on the host, which needs their lengths."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    host = {f"host_{name}": torch.from_numpy(arrays[name]) for name in ("documents", "grids") if name in arrays}
    return host | {name: torch.from_numpy(each).to(device) for name, each in arrays.items()}


def spec_here() -> VlmSpec:
    """Return a model of half a billion parameters on a GPU, and the tiny preset on a CPU."""
    if not torch.cuda.is_available():
        return VLM_PRESETS["tiny"]
    return replace(
        VLM_PRESETS["qwen2-vl-2b"],
        vision=VisionSpec(layers=12, hidden=768, heads=12, ffn=3072, patch=14, frames=2),
        projector=ProjectorSpec(merge=2, hidden=4 * 768),
        language=replace(PRESETS["qwen2.5-0.5b"], vocab=32000),
        image_token=IMAGE_TOKEN,
        sections=(),
        max_pixels=RULES.max_pixels,
    )


def speed_table(seconds: float) -> list[dict[str, Any]]:
    """Return the useful tokens per second of each method."""
    spec, gpu = spec_here(), torch.cuda.is_available()
    rules = replace(spec.images(), positions="line", image_token=spec.image_token)
    seq_len = SEQ_LEN if gpu else SEQ_LEN // 8
    mix = Mix(8000, scale=1.0 if gpu else 1 / 8, image_token=spec.image_token)
    share = DataShare(rank=0, dp=1, micro_batch=2, grad_accum=1)
    sides = [padded_side(mix, rules, seq_len, 24)]
    sides += [packed_side(mix, rules, batching, share, seq_len, 24) for batching in ("bucket", "pack")]
    work = _worker(spec, gpu)
    for number in range(4):
        for side in sides:
            work(side.batches[number][0])
    began, number = time.perf_counter(), 0
    while time.perf_counter() - began < seconds:
        for side in sides:
            batch, tokens = side.batches[number % len(side.batches)]
            start = time.perf_counter()
            work(batch)
            side.seconds += time.perf_counter() - start
            side.tokens += tokens
        number += 1
    return [
        {"way": side.name, "tokens_per_second": side.rate, "against_padded": side.rate / sides[0].rate}
        for side in sides
    ]


def _worker(spec: VlmSpec, gpu: bool) -> Callable[[Inputs], None]:
    """Return a function that runs forward and backward and synchronizes."""
    network = vlm_network(spec)
    initialise(network.module, seed=0, spec=spec)
    if gpu:
        network.module.to("cuda", torch.bfloat16)

    def work(batch: Inputs) -> None:
        logits, _ = network.forward(batch)
        summed_loss(logits, batch["labels"]).backward()
        network.module.zero_grad()
        if gpu:
            torch.cuda.synchronize()

    return work


def show(title: str, rows: list[dict[str, Any]]) -> None:
    print(f"\n{title}")
    names = list(rows[0])
    print(" | ".join(names))
    for row in rows:
        print(" | ".join(f"{each:.4g}" if isinstance(each, float) else str(each) for each in row.values()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--samples", type=int, default=1_000_000)
    parser.add_argument("--seconds", type=float, default=40.0)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    result = {"device": device, "torch": torch.__version__, "seq_len": SEQ_LEN, "samples": options.samples}
    result["waste"] = waste_table(options.samples)
    show(f"padding as a fraction of all tokens; seconds to pack {options.samples:,} samples", result["waste"])
    result["balance"] = balance_table()
    show("slowest rank over the mean, 512 rows per step, ranks synchronized in every micro-step", result["balance"])
    result["speed"] = speed_table(options.seconds)
    show(f"useful tokens per second, forward and backward, {device}", result["speed"])
    if options.json:
        options.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
