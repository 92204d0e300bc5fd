"""Compares data loading with DataLoader, torchdata's StatefulDataLoader and MosaicML Streaming, in one run.

`python -m benchmarks.loading [--seconds 4] [--rows 32000] [--long 1200000] [--workers 0 1 2] [--json]`: the same
tokens, on the local disk and in the page cache, in each library's own format: token shards (ours), one memory-mapped
array (DataLoader, StatefulDataLoader) and MDS shards (Streaming). All shuffle and return int64 tensors of tokens and
labels. A library that is not installed is skipped with a note. Four measurements:

- *rows per second* of 2048 tokens, in batches of 32 without compute, for each number of processes. The best result is
  also given as a multiple of what one H200 consumes when it trains a 1B model: 60,000 tokens per second, which is
  6 * 1.24e9 FLOP per token at 45 % of 989 TFLOP/s.
- *images per second*: JPEG files of 640 x 480 pixels to 504 x 364, see `loading_images`.
- *resume*: the time to the first batch after one million rows of 64 tokens.
- *4 ranks to 3* in the middle of an epoch of 997 rows: how many rows repeat or are lost. Each library resumes in its
  own way; where states are per rank, the state of rank r goes to the new rank r.
"""

import argparse
import importlib.util
import itertools
import json
import os
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from benchmarks.loading_images import images_per_second, write_images
from tests.ranks import run_ranks
from torch.utils.data import BatchSampler, DataLoader, Dataset, DistributedSampler, RandomSampler

from trimaran.data import ByteTokenizer, Sequences, ShardWriter, TokenShards
from trimaran.data.feed import DataShare
from trimaran.data.loader import Loader
from trimaran.data.text.token_feed import TokenFeed

H200_TOKENS_PER_SECOND = 60_000
SEQ_LEN, BATCH = 2048, 32
SHORT, MILLION = 64, 1_000_000
EPOCH, GLOBAL, BEFORE = 997, 12, 30  # rows, rows per step, steps on four ranks
PEERS = ("trimaran", "DataLoader", "StatefulDataLoader", "Streaming")


class Rows(Dataset):
    """Rows of a memory-mapped array of tokens, the usual way; the first token of a row is its number."""

    def __init__(self, path: Path, seq_len: int, *, numbered: bool = False) -> None:
        self.tokens, self.seq_len, self.numbered = np.load(path, mmap_mode="r"), seq_len, numbered

    def __len__(self) -> int:
        return (len(self.tokens) - 1) // self.seq_len

    def __getitem__(self, index: int) -> Any:
        if self.numbered:
            return index
        row = torch.from_numpy(self.tokens[index * self.seq_len : (index + 1) * self.seq_len + 1].astype(np.int64))
        return row[:-1], row[1:]


class SkippingSampler:
    """Shuffled batches without the first `skip`: how to resume a plain DataLoader exactly."""

    def __init__(self, rows: Dataset, batch: int, skip: int) -> None:
        shuffle = RandomSampler(rows, generator=torch.Generator().manual_seed(0))  # type: ignore[arg-type]
        self.batches, self.skip = BatchSampler(shuffle, batch, drop_last=True), skip

    def __iter__(self) -> Iterator[list[int]]:
        return itertools.islice(self.batches, self.skip, None)

    def __len__(self) -> int:
        return len(self.batches) - self.skip


def write(folder: Path, rows: int, seq_len: int) -> None:
    """Write the same tokens in the three formats."""
    tokens = np.random.default_rng(0).integers(0, 256, rows * seq_len + 1, dtype=np.uint16)
    np.save(folder / "tokens.npy", tokens)
    with ShardWriter(folder / "shards", ByteTokenizer()) as writer:
        for start in range(0, len(tokens), 1 << 22):
            writer.append(tokens[start : start + (1 << 22)])
            writer.end_document()
    if importlib.util.find_spec("streaming") is None:
        return
    from streaming import MDSWriter  # noqa: PLC0415 - it may not be there

    with MDSWriter(out=str(folder / "mds"), columns={"tokens": f"ndarray:uint16:{seq_len + 1}"}) as out:
        for row in range(rows):
            out.write({"tokens": tokens[row * seq_len : (row + 1) * seq_len + 1]})


def ours(folder: Path, seq_len: int, batch: int, workers: int, start: int = 0) -> Iterable[Any]:
    sequences = Sequences(
        shards := TokenShards.open(folder / "shards"), seq_len, False, 0, shards.num_tokens // seq_len
    )
    feed = TokenFeed(sequences, seed=0, share=DataShare(rank=0, dp=1, micro_batch=batch, grad_accum=1))
    return Loader(feed, start_step=start // batch, steps=1 << 40, workers=workers)


def plain(folder: Path, seq_len: int, batch: int, workers: int, start: int = 0) -> Iterable[Any]:
    rows = Rows(folder / "tokens.npy", seq_len)
    return DataLoader(rows, batch_sampler=SkippingSampler(rows, batch, start // batch), num_workers=workers)  # type: ignore[arg-type]


def stateful(folder: Path, seq_len: int, batch: int, workers: int, state: Any = None) -> Any:
    from torchdata.stateful_dataloader import StatefulDataLoader  # noqa: PLC0415 - it may not be there

    rows = Rows(folder / "tokens.npy", seq_len)
    loader = StatefulDataLoader(rows, batch_size=batch, shuffle=True, num_workers=workers, drop_last=True)
    if state is not None:
        loader.load_state_dict(state)
    return loader


def streaming(folder: Path, seq_len: int, batch: int, workers: int, start: int = 0) -> Iterable[Any]:
    from streaming import StreamingDataset  # noqa: PLC0415 - it may not be there
    from streaming.base.util import clean_stale_shared_memory  # noqa: PLC0415

    class Tokens(StreamingDataset):
        def __getitem__(self, index: Any) -> Any:
            row = torch.from_numpy(super().__getitem__(index)["tokens"].astype(np.int64))
            return row[:-1], row[1:]

    clean_stale_shared_memory()
    rows = Tokens(local=str(folder / "mds"), shuffle=True, shuffle_seed=0, batch_size=batch, num_canonical_nodes=1)
    resume_streaming(rows, start)
    return DataLoader(rows, batch_size=batch, num_workers=workers)


def resume_streaming(rows: Any, start: int) -> None:
    if start:  # the epoch is unknown before the first batch, and then it is too late to resume
        rows.load_state_dict({**rows.state_dict(start, from_beginning=True), "epoch": 0})


LOADERS: dict[str, Callable[..., Any]] = dict(zip(PEERS, (ours, plain, stateful, streaming), strict=True))


def rows_per_second(loader: Iterable[Any], batch: int, seconds: float) -> float:
    """Return the rows per second after a few warm-up batches. The epoch repeats when it ends."""
    endless = itertools.chain.from_iterable(iter(loader) for _ in itertools.count())
    for _ in range(8):
        next(endless)
    began, count = time.perf_counter(), 0
    while (spent := time.perf_counter() - began) < seconds:
        next(endless)
        count += batch
    close(loader)
    return count / spent


def close(loader: Any) -> None:
    getattr(loader, "close", lambda: None)()


def seconds_to_first(make: Callable[[], Iterable[Any]]) -> float:
    began = time.perf_counter()
    loader = make()
    next(iter(loader))
    spent = time.perf_counter() - began
    close(loader)
    return spent


def resume_seconds(name: str, folder: Path, batch: int = 100) -> float:
    """Return the seconds from opening the loader to the first batch after a million rows."""
    start = MILLION // batch * batch
    if name != "StatefulDataLoader":
        return seconds_to_first(lambda: LOADERS[name](folder, SHORT, batch, 0, start))
    running = stateful(folder, SHORT, batch, 0)
    for _ in itertools.islice(running, start // batch):  # its state exists only after loading all rows before
        pass
    state = running.state_dict()
    return seconds_to_first(lambda: stateful(folder, SHORT, batch, 0, state))


def rows_read_by_ours(folder: Path) -> list[int]:
    sequences = Sequences(TokenShards.open(folder / "shards"), SHORT, False, 0, EPOCH)

    def run(dp: int, first: int, last: int) -> list[int]:
        found: list[int] = []
        for rank in range(dp):
            share = DataShare(rank=rank, dp=dp, micro_batch=GLOBAL // dp, grad_accum=1)
            feed = TokenFeed(sequences, seed=0, share=share, epochs=1)
            with Loader(feed, start_step=first, steps=last) as loader:
                found += [each for batch in loader for each in batch.sample_ids]
        return found

    steps = -(-EPOCH // GLOBAL)
    return run(4, 0, BEFORE) + run(3, BEFORE, steps)


def rows_read_by_plain(folder: Path) -> list[int]:
    """Resume by hand: a sampler per rank that skips the finished steps."""
    rows = Rows(folder / "tokens.npy", SHORT, numbered=True)

    def run(ranks: int, first: int, last: int | None) -> list[int]:
        found: list[int] = []
        for rank in range(ranks):
            sampler = DistributedSampler(rows, ranks, rank, seed=0)
            loader = DataLoader(rows, batch_size=GLOBAL // ranks, sampler=sampler)
            found += [int(each) for batch in itertools.islice(loader, first, last) for each in batch]
        return found

    return run(4, 0, BEFORE) + run(3, BEFORE, None)


def rows_read_by_stateful(folder: Path) -> list[int]:
    from torchdata.stateful_dataloader import StatefulDataLoader  # noqa: PLC0415 - it may not be there
    from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler  # noqa: PLC0415

    rows = Rows(folder / "tokens.npy", SHORT, numbered=True)

    def loader_of(ranks: int, rank: int) -> Any:
        sampler = StatefulDistributedSampler(rows, ranks, rank, seed=0)
        return StatefulDataLoader(rows, batch_size=GLOBAL // ranks, sampler=sampler)

    found, states = [], []
    for rank in range(4):
        loader = loader_of(4, rank)
        found += [int(each) for batch in itertools.islice(loader, BEFORE) for each in batch]
        states.append(loader.state_dict())
    for rank in range(3):
        loader = loader_of(3, rank)
        loader.load_state_dict(states[rank])
        found += [int(each) for batch in loader for each in batch]
    return found


def rows_read_by_streaming(folder: Path) -> list[int]:
    from streaming.base.util import clean_stale_shared_memory  # noqa: PLC0415 - it may not be there

    clean_stale_shared_memory()  # ended ranks do not clean up theirs
    parts = run_ranks(4, stream_part, str(folder), 0, BEFORE, timeout=120.0)
    clean_stale_shared_memory()
    parts += run_ranks(3, stream_part, str(folder), BEFORE * GLOBAL, None, timeout=120.0)
    return [each for part in parts for each in part]


def stream_part(folder: str, start: int, steps: int | None) -> list[int]:
    """Return the rows that this rank reads from sample `start` of the epoch, in so many steps or to the end."""
    from streaming import StreamingDataset  # noqa: PLC0415 - it may not be there

    class Numbers(StreamingDataset):
        def __getitem__(self, index: Any) -> Any:
            return int(index)

    batch = GLOBAL // int(os.environ["WORLD_SIZE"])
    rows = Numbers(local=f"{folder}/few", shuffle=True, shuffle_seed=0, batch_size=batch, num_canonical_nodes=1)
    resume_streaming(rows, start)
    loader = DataLoader(rows, batch_size=batch, num_workers=0)
    return [int(each) for found in itertools.islice(loader, steps) for each in found]


MET: dict[str, Callable[[Path], list[int]]] = dict(
    zip(PEERS, (rows_read_by_ours, rows_read_by_plain, rows_read_by_stateful, rows_read_by_streaming), strict=True)
)


def write_few(folder: Path) -> None:
    """Write the first rows of the long data as a separate epoch, for the change of ranks."""
    tokens = np.load(folder / "tokens.npy", mmap_mode="r")[: EPOCH * SHORT + 1]
    np.save(folder / "few.npy", tokens)
    if importlib.util.find_spec("streaming") is None:
        return
    from streaming import MDSWriter  # noqa: PLC0415 - it may not be there

    with MDSWriter(out=str(folder / "few"), columns={"number": "int"}) as out:
        for row in range(EPOCH):
            out.write({"number": row})


def installed() -> dict[str, str]:
    """Return the installed peers and their versions."""
    from importlib.metadata import version  # noqa: PLC0415

    found = {"trimaran": version("trimaran"), "DataLoader": f"torch {torch.__version__}"}
    for name, module, package in (
        ("StatefulDataLoader", "torchdata", "torchdata"),
        ("Streaming", "streaming", "mosaicml-streaming"),
    ):
        if importlib.util.find_spec(module) is not None:
            found[name] = f"{package} {version(package)}"
    return found


def measure(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Return the results of every installed peer. They alternate, and the best round counts."""
    long = folder / "long"
    for path, rows, seq_len in ((folder, arguments.rows, SEQ_LEN), (long, arguments.long, SHORT)):
        path.mkdir(exist_ok=True)
        write(path, rows, seq_len)
    write_few(long)
    write_images(folder, 256)
    few = folder / "few"
    few.mkdir()
    shutil.copy(long / "few.npy", few / "tokens.npy")
    (few / "shards").symlink_to(long / "shards")
    if (long / "few").exists():
        (few / "few").symlink_to(long / "few")
    answers: dict[str, Any] = {name: {"version": version} for name, version in installed().items()}
    for workers, (name, found) in itertools.product(arguments.workers, answers.items()):
        speed = rows_per_second(LOADERS[name](folder, SEQ_LEN, BATCH, workers), BATCH, arguments.seconds)
        found.setdefault("rows_per_second", {})[workers] = round(speed)
        found.setdefault("pictures_per_second", {})[workers] = round(
            images_per_second(name, folder, workers, arguments.seconds)
        )
    for name, found in answers.items():
        best = max(found["rows_per_second"].values())
        found["times_an_h200"] = round(best * SEQ_LEN / H200_TOKENS_PER_SECOND, 1)
        found["resume_seconds"] = round(min(resume_seconds(name, long) for _ in range(2)), 3)
        met = Counter(MET[name](few))
        found["met_again"] = sum(count - 1 for count in met.values())
        found["never_met"] = EPOCH - len(met)
    return answers


def table(answers: dict[str, Any]) -> str:
    lines = [
        f"{'':20} {'rows/s (processes)':>32} {'x H200':>7} {'images/s':>26} {'resume':>9} {'again':>6} {'never':>6}"
    ]
    for name, found in answers.items():
        speeds, seen = (
            " ".join(f"{speed} ({workers})" for workers, speed in found[each].items())
            for each in ("rows_per_second", "pictures_per_second")
        )
        lines.append(
            f"{name:20} {speeds:>32} {found['times_an_h200']:7.1f} {seen:>26} {found['resume_seconds']:7.3f} s "
            f"{found['met_again']:6} {found['never_met']:6}"
        )
    missing = [name for name in PEERS if name not in answers]
    return "\n".join(lines + [f"{name}: not installed" for name in missing])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--rows", type=int, default=32_000)
    parser.add_argument("--long", type=int, default=1_200_000)
    parser.add_argument("--workers", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="trimaran-loading-"))
    try:
        answers = measure(arguments, folder)
    finally:
        shutil.rmtree(folder)
    print(json.dumps(answers, indent=1) if arguments.json else table(answers))


if __name__ == "__main__":
    main()
