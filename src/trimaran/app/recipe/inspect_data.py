"""What `trimaran data inspect` shows: facts about samples, and one sample as text, with its targets marked."""

from itertools import groupby
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from trimaran.app.show.text_chart import SKY
from trimaran.core import DataSection, ImageRules, show_count
from trimaran.data import PackingRules, SampleIndex, Tokenizer, TokenShards, measure_samples, open_row_packing

MAX_TOKENS = 1500  # of a sample that is shown
MAX_TEXT_TOKENS = 200  # of a document that is shown
LEARNT_STYLE = "bold black on green"
BEGIN_MARK, END_MARK = "\u27e6", "\u27e7"  # white square brackets, without colours
MAX_SHOWN_BAD = 5
BAR_CELLS = 40
BLOCKS = " ▏▎▍▌▋▊▉█"


def first_sample(index: SampleIndex, template: str) -> dict[str, Any]:
    """Return the first conversation of the index, or else its first sample, as text with spans."""
    chats = (each for each in range(min(index.num_samples, 1000)) if not index.sample(each).targets.all())
    number = next(chats, 0)
    record = index.sample(number)
    facts = _spans(index.tokenizer, record.tokens, record.targets, MAX_TOKENS)
    return {"origin": index.origin(number), "template": template, "images": len(record.images), **facts}


def first_document(shards: TokenShards) -> dict[str, Any]:
    """Return the beginning of the first document as text with spans. Everything but its first token is learnt."""
    tokens = shards.tokens(0, min(MAX_TEXT_TOKENS, shards.num_tokens))
    targets = np.ones(len(tokens), dtype=bool)
    targets[0] = False
    return {"origin": str(shards.path), "template": None, "images": 0} | _spans(
        shards.tokenizer, tokens, targets, MAX_TEXT_TOKENS
    )


def _spans(tokenizer: Tokenizer, tokens: np.ndarray, targets: np.ndarray, most: int) -> dict[str, Any]:
    """Return the text of the first tokens, and the character spans that are learnt and those that are not."""
    spans, text, stop = [], "", 0
    for learnt, group in groupby(targets[:most].tolist()):
        stop += len(list(group))
        longer = tokenizer.decode_all(tokens[:stop].tolist())  # the end of a text decides how its beginning is decoded
        spans.append({"start": len(text), "stop": len(longer), "learnt": learnt})
        text = longer
    counts = {"tokens": len(tokens), "learnt_tokens": int(targets.sum()), "shown_tokens": stop}
    return {"text": text, "spans": spans, **counts}


def show_sample(sample: dict[str, Any], console: Console) -> None:
    """Print the sample: what is learnt from in colour, or between brackets where there are no colours."""
    has_colours = console.color_system is not None
    how = "on green" if has_colours else f"between {BEGIN_MARK} and {END_MARK}"
    title = f", {sample['learnt_tokens']:,} of {sample['tokens']:,} tokens are learnt from ({how})"
    template = f", written with the chat template {sample['template']}" if sample["template"] else ""
    console.print(Text.assemble("\n", ("one sample", "bold"), title, template), soft_wrap=True)
    console.print(Text(f"{sample['origin']}"), soft_wrap=True, style="dim")
    shown = Text()
    for span in sample["spans"]:
        part = sample["text"][span["start"] : span["stop"]]
        if not span["learnt"]:
            shown.append(part)
        elif has_colours:
            shown.append(part, LEARNT_STYLE)
        else:
            shown.append(f"{BEGIN_MARK}{part}{END_MARK}")
    if sample["shown_tokens"] < sample["tokens"]:
        shown.append(f" ... {sample['tokens'] - sample['shown_tokens']:,} more tokens", "dim")
    console.print(shown, soft_wrap=True)


def describe(index: SampleIndex, section: DataSection, rules: ImageRules | None, seed: int) -> dict[str, Any]:
    """Return facts about the samples: by source, by length, their images, the packed rows, and the bad samples."""
    sample_sizes = measure_samples(index, rules)
    held = index.holdout_mask(section.holdout, seed)
    ids = index.mixed(seed, ~held)
    packing_rules = PackingRules(seq_len=section.seq_len, batching=section.samples.batching, seed=seed, images=rules)
    packing = open_row_packing(index, ids, sample_sizes, packing_rules, folder=index.path.parent / "charts")
    steps = np.floor(np.log2(np.maximum(sample_sizes.lengths, 1))).astype(np.int64)
    counts = np.bincount(steps)
    first = int(np.flatnonzero(counts)[0])
    sides = None
    if len(index.image_sizes):  # the smallest, the median and the largest
        width, height = (np.quantile(index.image_sizes[:, side], (0, 0.5, 1)).astype(int).tolist() for side in (0, 1))
        picture_tokens = np.quantile(sample_sizes.image_tokens, (0, 0.5, 1)).astype(int).tolist()
        patches = int(sample_sizes.image_patches.sum())
        sides = {"width": width, "height": height, "tokens": picture_tokens, "patches": patches}
    used = int(np.minimum(sample_sizes.lengths[packing.samples], packing.seq_len).sum())
    number = len(index.source_names)
    samples = np.bincount(index.sources, minlength=number)
    tokens = np.bincount(index.sources, weights=sample_sizes.lengths, minlength=number)
    images = np.bincount(index.sources, weights=index.image_counts, minlength=number)
    passing = np.bincount(index.sources[ids], minlength=number)
    return {
        "path": str(index.path),
        "digest": index.digest,
        "samples": index.num_samples,
        "pictures": index.num_images,
        "tokens": int(sample_sizes.lengths.sum()),
        "held_out": int(held.sum()),
        "sources": [
            {
                "name": name,
                "samples": int(samples[each]),
                "tokens": int(tokens[each]),
                "pictures": int(images[each]),
                "pass": int(passing[each]),  # samples that occur in one pass of training
                "bad": index.parts[each].meta.num_bad,
                "part": str(index.parts[each].path),
            }
            for each, name in enumerate(index.source_names)
        ],
        "lengths": [
            {"least": 2**step, "most": 2 ** (step + 1) - 1, "samples": int(counts[step])}
            for step in range(first, len(counts))
        ],
        "picture_sides": sides,
        "rows": {
            "rows": len(packing),
            "seq_len": packing.seq_len,
            "batching": packing.batching,
            "filled": used / max(1, len(packing) * packing.seq_len),
            "cut": packing.num_truncated,
            "left_out": {reason: count for reason, count in packing.left_out.items() if count},
        },
        "bad": index.bad,
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
        fraction = each["samples"] / most
        eighths = max(round(fraction * BAR_CELLS * 8), int(fraction > 0))
        bar = "█" * (eighths // 8) + BLOCKS[eighths % 8].strip()
        console.print(Text.assemble(f"{span:>21}  ", (bar, SKY), f" {each['samples']:,}"))
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
    if facts["bad"]:
        console.print(Text.assemble("\n", ("bad samples", "bold"), f", left out: {len(facts['bad']):,}"))
    for entry in facts["bad"][:MAX_SHOWN_BAD]:
        console.print(f"  {entry['where']}: {entry['reason']}", soft_wrap=True)
    if len(facts["bad"]) > MAX_SHOWN_BAD:
        parts = (f"{each['part']}/bad.jsonl" for each in facts["sources"] if each["bad"])
        console.print(f"  and {len(facts['bad']) - MAX_SHOWN_BAD:,} more in", *parts, soft_wrap=True)
    if facts.get("sample"):
        show_sample(facts["sample"], console)
    for notice in facts.get("notices", ()):
        console.print(Text.assemble("\n", ("notice", "bold"), f"    {notice}"), soft_wrap=True)
    console.print(f"\nprepared  {facts['path']}", soft_wrap=True)


def _spread(three: list[int]) -> str:
    least, median, most = three
    return f"{least:,}" if least == most else f"{least:,} to {most:,} (median {median:,})"
