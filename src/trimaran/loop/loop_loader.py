"""`loop.loader`: each rank loads only its rows of a global batch. The number of ranks does not change the order."""

import base64
import json
import random
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten, treespec_dumps, treespec_loads
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, RandomSampler, SequentialSampler
from torch.utils.data.distributed import DistributedSampler

from trimaran.core import UserError
from trimaran.data import positions
from trimaran.loop.loop_context import CAUSES, LoopContext, digest, kept_generators, part_of, to_device
from trimaran.parallel import all_gather_json, broadcast_json
from trimaran.train import FlagAllReduce

WHERE = "loop.loader(...)"
NUM_COMPARED = 2  # samples that all ranks load at the start, to see whether they read the same dataset
KEPT = ("num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context",
        "prefetch_factor", "persistent_workers")  # fmt: skip
Place = tuple[int, int]  # the seed of a sample, and its index in the dataset


class LoopLoader:
    """Yields this rank's rows of each global batch, on the device. A `for` over it is one epoch.

    `epoch` is the number of the current or next epoch. The order of samples is a pure function of seed and epoch, or
    that of the DataLoader's own sampler and generator. Every sample is loaded with random generators seeded by seed,
    epoch and index, so that random crops too are the same on any number of ranks. The state that a checkpoint holds is
    the position after the last `loop.step()`.
    """

    def __init__(self, context: LoopContext, source: DataLoader, seed: int | None) -> None:
        self._context, self._source = context, source
        self._seed = broadcast_json((torch.initial_seed() if seed is None else seed) % 2**63)
        self._order: ShuffledOrder | SamplerOrder = SamplerOrder(source)
        sampler = source.sampler
        if type(source.batch_sampler) is BatchSampler and source.generator is None:
            is_plain = type(sampler) is RandomSampler and sampler.generator is None and not sampler.replacement
            is_shuffled = is_plain and sampler.num_samples == len(source.dataset)  # pyrefly: ignore
            if is_shuffled or type(sampler) is SequentialSampler:
                self._order = ShuffledOrder(source, shuffle=is_shuffled)
        self.dataset: Any = source.dataset
        self.batch_size = source.batch_size
        self.batch_dim = 0  # of the rows in a batch
        self.epoch = 0
        self._position = self._stepped = EpochPosition(0)
        self._is_resumed = False
        self._places = RankPlaces()
        self._loader = DataLoader(
            SeededSamples(self.dataset),
            batch_sampler=self._places,
            generator=torch.Generator(),  # worker seeds are drawn from it, and not from the global generator
            **{name: getattr(source, name) for name in KEPT},
        )
        context.step_hooks.append(self._on_step)
        if context.world_size > 1:
            self._compare_datasets()

    def __len__(self) -> int:
        """Return the number of global batches of an epoch."""
        return len(self._source)

    def __iter__(self) -> Iterator[Any]:
        if not self._is_resumed and self._position.num_samples:  # the last epoch was left before its end
            self._position = EpochPosition(self._position.epoch + 1)
        self._is_resumed = False
        self.epoch, start = self._position.epoch, self._position
        self._places.plan = (self._place(batch) for batch in self._order.batches(self._seed, start))
        iterator = iter(self._loader)
        for batch in self._order.batches(self._seed, start):
            with nullcontext() if self._loader.num_workers else kept_generators():
                rows = next(iterator)
            self._position = EpochPosition(self.epoch, self._position.num_samples + len(batch))
            self._deal(rows, batch)
            yield self._context.local_batch
        is_stepped = self._stepped is self._position
        self._position = EpochPosition(self.epoch + 1)
        self._stepped = self._position if is_stepped else self._stepped
        self.epoch = self._position.epoch

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the last step, for `loop.save(..., loader=loader)`. Equal on all ranks."""
        at = self._stepped
        order = self._order.state(at.epoch)
        return {"seed": self._seed, "epoch": at.epoch, "samples": at.num_samples, "order": order}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._seed = state["seed"]
        self._order.restore(state["order"])
        position = EpochPosition(state["epoch"], state["samples"])
        if position.num_samples and next(iter(self._order.batches(self._seed, position)), None) is None:
            position = EpochPosition(position.epoch + 1)
        self._position = self._stepped = position
        self.epoch, self._is_resumed = position.epoch, True

    def _place(self, batch: np.ndarray) -> list[Place]:
        """Return this rank's samples of a global batch; if it has none, the first, which will not count."""
        part = part_of(len(batch), self._context.rank, self._context.world_size)
        mine = batch[part.start : part.stop] if part else batch[:1]
        return [(_sample_seed(self._seed, self.epoch, int(index)), int(index)) for index in mine]

    def _deal(self, rows: Any, batch: np.ndarray) -> None:
        context = self._context
        shares = [len(part_of(len(batch), rank, context.world_size)) for rank in range(context.world_size)]
        context.local_rows = shares[context.rank]
        context.min_local_rows, context.max_local_rows = min(shares), max(shares)
        context.is_padding, context.any_padding = not context.local_rows, not min(shares)
        context.local_batch, context.loader_dim = to_device(rows, context.device), self.batch_dim
        context.note_rows(context.local_batch, self.batch_dim)
        if not context.is_evaluating:
            context.set_sync(True)
        context.check_same(torch.from_numpy(batch), num_rows=len(batch), where=WHERE)

    def _on_step(self) -> None:
        self._stepped = self._position

    def _compare_datasets(self) -> None:
        """Raise UserError if ranks read different datasets. Samples that differ at every load are not compared."""
        chosen = sorted({0, len(self.dataset) - 1})[:NUM_COMPARED] if len(self.dataset) else []
        samples = SeededSamples(self.dataset)
        with kept_generators():
            loads = [[digest(samples[self._seed, index]) for index in chosen] for _ in range(2)]
        rows = all_gather_json([len(self.dataset), loads[0] if loads[0] == loads[1] else None])
        if any(each[0] != rows[0][0] for each in rows):
            what = "; ".join(f"rank {rank} has {length} samples" for rank, (length, _) in enumerate(rows))
        elif all(hashes is not None for _, hashes in rows) and any(each != rows[0] for each in rows):
            odd = ", ".join(str(rank) for rank, each in enumerate(rows) if each != rows[0])
            what = f"samples {chosen} of rank(s) {odd} are not those of rank 0"
        else:
            return
        raise UserError("P045.ranks-read-different", where=WHERE, fix=CAUSES, text=what)


@dataclass(frozen=True, slots=True, eq=False)
class EpochPosition:
    """How many samples of an epoch have been dealt."""

    epoch: int
    num_samples: int = 0


class RankPlaces(BatchSampler):
    """The samples of this rank in each batch of the current epoch, for the DataLoader that loads them."""

    def __init__(self) -> None:
        self.plan: Iterable[list[Place]] = ()

    def __iter__(self) -> Iterator[list[Any]]:
        return iter(self.plan)


class SeededSamples(Dataset):
    """A dataset whose samples are loaded with seeded global generators, so that the order of loads does not matter."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __getitem__(self, index: Place) -> Any:
        seed, number = index
        _seed_generators(seed)
        return self._dataset[number]


class ShuffledOrder:
    """Batches of consecutive places in a permutation (or of the dataset itself) that needs no table of the dataset."""

    def __init__(self, source: DataLoader, *, shuffle: bool) -> None:
        self._length, self._shuffle = len(source.dataset), shuffle  # pyrefly: ignore[bad-argument-type]
        assert source.batch_size is not None
        self._size = source.batch_size
        self._end = self._length - self._length % self._size if source.drop_last else self._length

    def batches(self, seed: int, position: EpochPosition) -> Iterator[np.ndarray]:
        for start in range(position.num_samples, self._end, self._size):
            places = np.arange(start, min(start + self._size, self._end))
            before = position.epoch * self._length
            yield positions(seed, before + places, self._length) if self._shuffle else places

    def state(self, epoch: int) -> None:
        return None

    def restore(self, state: None) -> None: ...


class SamplerOrder:
    """The batches of a DataLoader's own sampler, as it would draw them in one process.

    A sampler with a generator continues it from epoch to epoch; its state at the start of the epoch is saved. Without
    one, torch's, NumPy's and Python's generators are seeded by seed and epoch while it draws.
    """

    def __init__(self, source: DataLoader) -> None:
        self._source = source
        found = [each for each in (source.generator, getattr(source.sampler, "generator", None)) if each is not None]
        self._generators: list[torch.Generator] = list({id(each): each for each in found}.values())
        length = len(source.dataset)  # pyrefly: ignore[bad-argument-type]
        self._indices = DataLoader(
            range(length),  # pyrefly: ignore[bad-argument-type]
            batch_sampler=source.batch_sampler,
            generator=source.generator,
            collate_fn=np.array,
        )
        self._states: list[Tensor] = []  # of the generators at the start of the epoch
        self._restored: list[Tensor] | None = None
        self._drawn: tuple[int, list[np.ndarray]] | None = None

    def batches(self, seed: int, position: EpochPosition) -> list[np.ndarray]:
        if self._drawn is None or self._drawn[0] != position.epoch:
            for generator, state in zip(self._generators, self._restored or (), strict=self._restored is not None):
                generator.set_state(state)
            self._restored = None
            self._states = [each.get_state() for each in self._generators]
            for each in (self._source.sampler, self._source.batch_sampler):
                if hasattr(each, "set_epoch"):
                    each.set_epoch(position.epoch)
            with kept_generators():
                if not self._generators:
                    _seed_generators(_sample_seed(seed, position.epoch, -1))
                self._drawn = position.epoch, list(self._indices)
        left, num_samples = [], position.num_samples
        for batch in self._drawn[1]:  # the batch size may have changed since the first samples were dealt
            left.append(batch[num_samples:])
            num_samples = max(0, num_samples - len(batch))
        return [batch for batch in left if len(batch)]

    def state(self, epoch: int) -> list[str]:
        is_drawn = self._drawn is not None and self._drawn[0] == epoch
        states = self._states if is_drawn else self._restored or [each.get_state() for each in self._generators]
        return [base64.b64encode(each.numpy().tobytes()).decode() for each in states]

    def restore(self, state: list[str]) -> None:
        self._drawn = None
        self._restored = [torch.frombuffer(bytearray(base64.b64decode(each)), dtype=torch.uint8) for each in state]


def build_loader(
    context: LoopContext, data: Any, *, batch_size: int | None, shuffle: bool, seed: int | None
) -> LoopLoader:
    """Return the loader of a dataset, or of a DataLoader, whose settings it keeps."""
    if isinstance(data, DataLoader):
        source = data
        if batch_size is not None:
            raise _refusal("the DataLoader has a batch size already", "set it there: loop.loader(data_loader)")
    elif batch_size is None and not isinstance(data, IterableDataset):
        raise _refusal("a dataset needs a batch size", "loop.loader(dataset, batch_size=64): the rows of all ranks")
    elif isinstance(data, IterableDataset):
        source = DataLoader(data)
    else:
        source = DataLoader(data, batch_size=batch_size, shuffle=shuffle)
    if isinstance(source.dataset, IterableDataset):
        raise _refusal("an IterableDataset has no indices to deal", "use a dataset with __len__ and __getitem__, or "
                       "give each rank its own part: loop.uneven_batches(batches)")  # fmt: skip
    if isinstance(source.sampler, DistributedSampler):
        raise _refusal("the DataLoader has a DistributedSampler", "remove it: loop.loader deals the samples to ranks")
    if source.batch_sampler is None:
        raise _refusal("the DataLoader has batch_size=None", "let it batch: batch_size is the rows of all ranks")
    return LoopLoader(context, source, seed)


def _refusal(what: str, fix: str) -> UserError:
    return UserError("P047.loop-loader", where=WHERE, fix=fix, text=what)


def _sample_seed(seed: int, epoch: int, index: int) -> int:
    hashed = blake2b(struct.pack("<Qqq", seed % 2**64, epoch, index), digest_size=8)
    return struct.unpack("<Q", hashed.digest())[0] >> 1


def _seed_generators(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.random.default_generator.manual_seed(seed)


NO_BATCH: Any = object()


def uneven_batches(batches: Iterable[Any], device: torch.device, set_counted: Callable[[bool], None]) -> Iterator[Any]:
    """Yield this rank's batches on `device`, then its last one again until every rank has run out.

    `set_counted` gets whether each counts. The all-reduce that asks for more runs while a batch is computed.
    """
    source = iter(batches)
    batch = next(source, NO_BATCH)
    if not FlagAllReduce(batch is not NO_BATCH).wait():
        return
    last = _own_or_borrowed(batch)
    try:
        while True:
            set_counted(batch is not NO_BATCH)
            following = next(source, NO_BATCH) if batch is not NO_BATCH else NO_BATCH
            more = FlagAllReduce(following is not NO_BATCH)
            yield to_device(last, device)
            if not more.wait():
                return
            batch, last = following, last if following is NO_BATCH else following
    finally:
        set_counted(True)


def _own_or_borrowed(batch: Any) -> Any:
    """Return `batch`, or the first batch of another rank if this rank has none. Every rank must call it."""
    has_batch = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size())]
    dist.all_gather(has_batch, torch.tensor([int(batch is not NO_BATCH)]))
    if all(has_batch):
        return batch
    source = next(rank for rank, each in enumerate(has_batch) if each)
    is_source = dist.get_rank() == source
    leaves, description = [], None
    if is_source:
        leaves, layout = tree_flatten(batch)
        described = [
            {"shape": each.shape, "dtype": str(each.dtype).removeprefix("torch.")}
            if isinstance(each, Tensor)
            else {"value": each}
            for each in leaves
        ]
        with suppress(TypeError, ValueError, NotImplementedError):  # JSON cannot hold a value
            description = json.loads(json.dumps({"leaves": described, "layout": treespec_dumps(layout)}))
    description = broadcast_json(description, src=source)
    if description is None:
        raise UserError("T061.rank-no-batch", where="uneven_batches(batches)")
    borrowed: list[Any] = []
    for number, leaf in enumerate(description["leaves"]):
        if "shape" in leaf:
            empty = torch.empty(leaf["shape"], dtype=getattr(torch, leaf["dtype"]))
            tensor = leaves[number].detach().cpu().contiguous() if is_source else empty
            dist.broadcast(tensor.view(-1).view(torch.uint8) if tensor.numel() else torch.zeros(1), src=source)
            borrowed.append(tensor)
        else:
            borrowed.append(leaf["value"])
    return batch if batch is not NO_BATCH else tree_unflatten(borrowed, treespec_loads(description["layout"]))
