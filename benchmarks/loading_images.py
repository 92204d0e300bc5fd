"""Image loading for `benchmarks.loading`: from JPEG files, or MDS shards of them, to pixels of one size.

The peers open, convert to RGB, resize with the same filter and make a tensor. Ours also cuts patches, inserts image
tokens into the text and packs rows.
"""

import importlib.util
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset

from trimaran.core import DataSection, ImageRules, RowCost
from trimaran.data.feed import DataShare
from trimaran.data.loader import Loader
from trimaran.data.sample_feed import SampleFeedOptions, sample_feeds
from trimaran.data.samples.prepare_samples import prepare_samples
from trimaran.data.samples.sample_index import SampleIndex

WIDTH, HEIGHT, BATCH = 640, 480, 16
TARGET = (504, 364)  # the size of a WIDTH x HEIGHT image under RULES
RULES = ImageRules(patch=14, merge=2, image_token=257, max_pixels=448 * 448)


class Files(Dataset):
    """JPEG files as tensors."""

    def __init__(self, folder: Path) -> None:
        self.files = sorted(folder.glob("*.jpg"))

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> torch.Tensor:
        with Image.open(self.files[index]) as image:
            return pixels(image)


def pixels(image: Image.Image) -> torch.Tensor:
    return torch.from_numpy(np.array(image.convert("RGB").resize(TARGET, Image.Resampling.BICUBIC)))


def write_images(folder: Path, count: int) -> None:
    """Write noise that is smooth enough to compress like photographs."""
    (folder / "pictures").mkdir(parents=True)
    draw = np.random.default_rng(0)
    for number in range(count):
        small = Image.fromarray(draw.integers(0, 255, (60, 80, 3), dtype=np.uint8))
        file = folder / "pictures" / f"{number:05d}.jpg"
        small.resize((WIDTH, HEIGHT), Image.Resampling.BICUBIC).save(file, quality=90)
        file.with_suffix(".txt").write_text(f"image {number}")
    if importlib.util.find_spec("streaming") is None:
        return
    from streaming import MDSWriter  # noqa: PLC0415 - it may not be there

    with MDSWriter(out=str(folder / "jpegs"), columns={"image": "bytes"}) as out:
        for file in sorted((folder / "pictures").glob("*.jpg")):
            out.write({"image": file.read_bytes()})


def ours(folder: Path, workers: int) -> Iterable[int]:
    section = DataSection(source="image-folder", path=str(folder / "pictures"), seq_len=2048, holdout=0)
    index = SampleIndex.open(prepare_samples(section, rules=RULES, cache=folder / "cache"))
    share = DataShare(rank=0, dp=1, micro_batch=4, grad_accum=1)
    feed, _ = sample_feeds(section, index, SampleFeedOptions(rules=RULES, cost=RowCost()), share=share)
    with Loader(feed, steps=1 << 40, workers=workers) as loader:
        for batch in loader:
            yield len(batch.arrays["grids"])


def plain(folder: Path, workers: int) -> Iterator[int]:
    yield from endless(DataLoader(Files(folder / "pictures"), batch_size=BATCH, shuffle=True, num_workers=workers))


def stateful(folder: Path, workers: int) -> Iterator[int]:
    from torchdata.stateful_dataloader import StatefulDataLoader  # noqa: PLC0415 - it may not be there

    files = Files(folder / "pictures")
    yield from endless(StatefulDataLoader(files, batch_size=BATCH, shuffle=True, num_workers=workers))


def streaming(folder: Path, workers: int) -> Iterator[int]:
    import io  # noqa: PLC0415

    from streaming import StreamingDataset  # noqa: PLC0415 - it may not be there
    from streaming.base.util import clean_stale_shared_memory  # noqa: PLC0415

    class Jpegs(StreamingDataset):
        def __getitem__(self, index: Any) -> Any:
            return pixels(Image.open(io.BytesIO(super().__getitem__(index)["image"])))

    clean_stale_shared_memory()
    rows = Jpegs(local=str(folder / "jpegs"), shuffle=True, batch_size=BATCH, num_canonical_nodes=1)
    yield from endless(DataLoader(rows, batch_size=BATCH, num_workers=workers))


def endless(loader: Iterable[torch.Tensor]) -> Iterator[int]:
    while True:
        for batch in loader:
            yield len(batch)


IMAGES: dict[str, Callable[[Path, int], Iterable[int]]] = {
    "trimaran": ours,
    "DataLoader": plain,
    "StatefulDataLoader": stateful,
    "Streaming": streaming,
}


def images_per_second(name: str, folder: Path, workers: int, seconds: float) -> float:
    """Return the images per second after two warm-up batches."""
    batches = iter(IMAGES[name](folder, workers))
    next(batches), next(batches)
    began, count = time.perf_counter(), 0
    while (spent := time.perf_counter() - began) < seconds:
        count += next(batches)
    batches.close()  # type: ignore[attr-defined]
    return count / spent
