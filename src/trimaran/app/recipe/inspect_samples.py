"""Describes the samples of a recipe, and prints the description."""

from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from trimaran.app.recipe.rendered_sample import show_sample
from trimaran.app.show.text_chart import SKY
from trimaran.core import DataSection, ImageRules, show_count
from trimaran.data.row_packing import PackingRules, RowPacking, open_row_packing
from trimaran.data.sample_costs import SampleSizes, measure_samples
from trimaran.data.samples.sample_index import SampleIndex

MAX_SHOWN_BAD = 5
BAR_CELLS = 40
BLOCKS = " ▏▎▍▌▋▊▉█"


def describe(index: SampleIndex, section: DataSection, rules: ImageRules | None, seed: int) -> dict[str, Any]:
    """Return facts about the samples: by source, by length, their images, the packed rows, and the bad samples."""
    sample_sizes = measure_samples(index, rules)
    held = index.holdout_mask(section.holdout, seed)
    ids = index.mixed(seed, ~held)
    packing_rules = PackingRules(seq_len=section.seq_len, batching=section.samples.batching, seed=seed, images=rules)
    packing = open_row_packing(index, ids, sample_sizes, packing_rules, folder=index.path.parent / "charts")
    return {
        "path": str(index.path),
        "digest": index.digest,
        "samples": index.num_samples,
        "pictures": index.num_images,
        "tokens": int(sample_sizes.lengths.sum()),
        "held_out": int(held.sum()),
        "sources": _sources(index, sample_sizes, ids),
        "lengths": _histogram(sample_sizes.lengths),
        "picture_sides": _sides(index.image_sizes, sample_sizes),
        "rows": _rows(packing, sample_sizes),
        "bad": index.bad,
    }


def _sources(index: SampleIndex, sample_sizes: SampleSizes, ids: np.ndarray) -> list[dict[str, Any]]:
    """Return the counts of each source. `pass` is how many of its samples occur in one pass of training."""
    number = len(index.source_names)
    samples = np.bincount(index.sources, minlength=number)
    tokens = np.bincount(index.sources, weights=sample_sizes.lengths, minlength=number)
    images = np.bincount(index.sources, weights=index.image_counts, minlength=number)
    passing = np.bincount(index.sources[ids], minlength=number)
    return [
        {
            "name": name,
            "samples": int(samples[each]),
            "tokens": int(tokens[each]),
            "pictures": int(images[each]),
            "pass": int(passing[each]),
            "bad": index.parts[each].meta.num_bad,
            "part": str(index.parts[each].path),
        }
        for each, name in enumerate(index.source_names)
    ]


def _histogram(lengths: np.ndarray) -> list[dict[str, int]]:
    """Return how many samples have from `least` to `most` tokens, in bins of doubling width."""
    steps = np.floor(np.log2(np.maximum(lengths, 1))).astype(np.int64)
    counts = np.bincount(steps)
    first = int(np.flatnonzero(counts)[0])
    return [
        {"least": 2**step, "most": 2 ** (step + 1) - 1, "samples": int(counts[step])}
        for step in range(first, len(counts))
    ]


def _sides(sizes: np.ndarray, sample_sizes: SampleSizes) -> dict[str, Any] | None:
    """Return the smallest, median and largest sides and token counts of the images, and the number of patches."""
    if not len(sizes):
        return None
    width, height = (np.quantile(sizes[:, side], (0, 0.5, 1)).astype(int).tolist() for side in (0, 1))
    tokens = np.quantile(sample_sizes.image_tokens, (0, 0.5, 1)).astype(int).tolist()
    return {"width": width, "height": height, "tokens": tokens, "patches": int(sample_sizes.image_patches.sum())}


def _rows(packing: RowPacking, sample_sizes: SampleSizes) -> dict[str, Any]:
    """Return the rows of one pass of training, and the fraction of their positions that holds a token."""
    used = int(np.minimum(sample_sizes.lengths[packing.samples], packing.seq_len).sum())
    return {
        "rows": len(packing),
        "seq_len": packing.seq_len,
        "batching": packing.batching,
        "filled": used / max(1, len(packing) * packing.seq_len),
        "cut": packing.num_truncated,
        "left_out": {reason: count for reason, count in packing.left_out.items() if count},
    }


def show(facts: dict[str, Any], console: Console) -> None:
    """Print the facts."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("source")
    for column in ("samples", "tokens", "images", "per pass", "bad"):
        table.add_column(column, justify="right")
    for each in facts["sources"]:
        table.add_row(each["name"], f"{each['samples']:,}", show_count(each["tokens"]), f"{each['pictures']:,}",
                      f"{each['pass']:,}", f"{each['bad']:,}")  # fmt: skip
    console.print(table)
    included = ", image tokens included" if facts["pictures"] else ""
    console.print(Text.assemble("\n", ("tokens of a sample", "bold"), included))
    most = max(each["samples"] for each in facts["lengths"])
    for each in facts["lengths"]:
        span = f"{each['least']:,} to {each['most']:,}"
        console.print(Text.assemble(f"{span:>21}  ", (_bar(each["samples"] / most), SKY), f" {each['samples']:,}"))
    if sides := facts["picture_sides"]:
        width, height, tokens = (_spread(sides[name]) for name in ("width", "height", "tokens"))
        console.print(f"\nimages    {width} pixels wide, {height} high, {tokens} tokens each")
    rows = facts["rows"]
    console.print(f"\nrows      {rows['rows']:,} of {rows['seq_len']:,} tokens ({rows['batching']}), "
                  f"{rows['filled']:.1%} full, {facts['held_out']:,} samples held out")  # fmt: skip
    if rows["cut"]:
        console.print(f"          {rows['cut']:,} samples are longer than a row and are truncated")
    for reason, count in rows["left_out"].items():
        console.print(f"          {count:,} samples are left out: {reason}")
    _show_bad(facts, console)
    if facts.get("sample"):
        show_sample(facts["sample"], console)
    for notice in facts.get("notices", ()):
        console.print(Text.assemble("\n", ("notice", "bold"), f"    {notice}"), soft_wrap=True)
    console.print(f"\nprepared  {facts['path']}", soft_wrap=True)


def _show_bad(facts: dict[str, Any], console: Console) -> None:
    if not facts["bad"]:
        return
    console.print(Text.assemble("\n", ("bad samples", "bold"), f", left out: {len(facts['bad']):,}"))
    for entry in facts["bad"][:MAX_SHOWN_BAD]:
        console.print(f"  {entry['where']}: {entry['reason']}", soft_wrap=True)
    if len(facts["bad"]) > MAX_SHOWN_BAD:
        console.print(f"  and {len(facts['bad']) - MAX_SHOWN_BAD:,} more in", *(
            f"{each['part']}/bad.jsonl" for each in facts["sources"] if each["bad"]
        ), soft_wrap=True)  # fmt: skip


def _spread(three: list[int]) -> str:
    least, median, most = three
    return f"{least:,}" if least == most else f"{least:,} to {most:,} (median {median:,})"


def _bar(fraction: float) -> str:
    """Return a bar of up to `BAR_CELLS` cells, to an eighth of a cell."""
    eighths = max(round(fraction * BAR_CELLS * 8), int(fraction > 0))
    return "█" * (eighths // 8) + BLOCKS[eighths % 8].strip()
