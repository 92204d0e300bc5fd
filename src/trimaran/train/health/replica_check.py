"""Looks now and then whether replicas are still the same, bit for bit: memory, devices and links can lie silently.

What several ranks hold must be equal, since all of them add the same gradients to the same weights. A sum over the bits
finds any single flip, though not two values that changed places. With three replicas or more the odd one is to blame;
of two, one is wrong and nobody knows which.
"""

import hashlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from trimaran.checkpoint.tensor_shards import TensorShard

gather_single = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)  # the new name of torch 2.13
EVERY = 100
NUM_KEYS = 8
WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}  # by bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaDifference:
    """Replicas that are no longer equal. `ranks` hold what most do not, or all the ranks in question when half against
    half stand (`known` is False then). `since` is the last step at which all were equal."""

    step: int
    ranks: tuple[int, ...]
    known: bool
    keys: tuple[str, ...]
    since: int

    def as_dict(self) -> dict[str, Any]:
        """Return the data of an `error` event."""
        many = (
            "more than one rank holds" if not self.known else "one rank holds" if len(self.ranks) == 1 else "ranks hold"
        )
        message = f"replicas differ: {many} other bits of {', '.join(self.keys[:2])} than the rest"
        return {
            "type": "ReplicasDiffer",
            "message": message,
            "cause": "numeric",
            "ranks": list(self.ranks),
            "keys": list(self.keys),
            "since": self.since,
        }


class ReplicaCheck:
    """Compares the weights of all ranks every `every` steps. All ranks call `check` with the same steps."""

    def __init__(
        self, pieces: Callable[[], Sequence[TensorShard]], *, device: torch.device, every: int = EVERY
    ) -> None:
        self._pieces, self._device, self._every = pieces, device, every
        self._replicated: bool | None = None  # known after the first look
        self._since, self._last = 0, -1

    def check(self, step: int) -> ReplicaDifference | None:
        """Return what differs after `step`, alike on all ranks, or None. Costs nothing where nobody holds replicas."""
        if self._last == -1 or step <= self._last:
            self._since = step - 1  # the run begins here or went back, with a state that all read alike
        self._last = step
        if step % self._every or self._replicated is False or dist.get_world_size() == 1:
            return None
        held = [each for each in self._pieces() if _is_weight(each)]
        table = _gather(held, self._device)
        self._replicated = bool((_holders(table[..., 0]) > 1).any())
        odd, known, ids = find_odd(table)
        if not odd:
            self._since = step
            return None
        keys = tuple(each.key for each in held if _name(each) in ids)[:NUM_KEYS]
        return ReplicaDifference(step=step, ranks=odd, known=known, keys=_of_rank(odd[0], keys), since=self._since)


def find_odd(table: np.ndarray) -> tuple[tuple[int, ...], bool, frozenset[int]]:
    """Return the ranks that differ, whether a majority stands against them, and the names of what differs.

    `table` is int64 [ranks, pieces, 2]: name and sum of the bits of each piece; the name 0 is padding.
    """
    names, sums = table[..., 0], table[..., 1]
    odd: set[int] = set()
    known, ids = True, set()
    for name in _unequal(names, sums):
        ranks, places = np.nonzero(names == name)
        votes = Counter(sums[ranks, places].tolist())
        (most, count), *others = votes.most_common()
        tie = bool(others) and others[0][1] == count
        known &= not tie
        odd |= {int(rank) for rank, value in zip(ranks, sums[ranks, places], strict=True) if tie or value != most}
        ids.add(int(name))
    return tuple(sorted(odd)), known, frozenset(ids)


def _unequal(names: np.ndarray, sums: np.ndarray) -> list[int]:
    """Return the names under which not all sums are equal."""
    order = np.argsort(names, axis=None, kind="stable")
    flat_names, flat_sums = names.reshape(-1)[order], sums.reshape(-1)[order]
    starts = np.flatnonzero(np.r_[True, flat_names[1:] != flat_names[:-1]])
    low, high = np.minimum.reduceat(flat_sums, starts), np.maximum.reduceat(flat_sums, starts)
    return [int(name) for name in flat_names[starts[low != high]] if name != 0]


def _holders(names: np.ndarray) -> np.ndarray:
    """Return how many ranks hold each named piece."""
    kept = names[names != 0]
    return np.unique(kept, return_counts=True)[1] if kept.size else np.zeros(1, dtype=np.int64)


def _gather(held: Sequence[TensorShard], device: torch.device) -> np.ndarray:
    """Return name and sum of all pieces of all ranks: [ranks, pieces, 2], padded with zeros."""
    length = torch.tensor(len(held), device=device)
    dist.all_reduce(length, op=dist.ReduceOp.MAX)
    mine = torch.zeros(int(length), 2, dtype=torch.int64, device=device)
    if held:
        mine[: len(held), 0] = torch.tensor([_name(each) for each in held], device=device)
        mine[: len(held), 1] = torch.stack([bit_sum(each).to(device) for each in _tensors(held)])
    gathered = torch.empty(dist.get_world_size() * mine.shape[0], 2, dtype=torch.int64, device=device)
    gather_single(gathered, mine)
    return gathered.reshape(-1, *mine.shape).cpu().numpy()


def _tensors(held: Sequence[TensorShard]) -> list[Tensor]:
    tensors = [each.tensor for each in held if isinstance(each.tensor, Tensor)]
    assert len(tensors) == len(held), "what a rank holds in another form it holds alone: nobody has a replica"
    return tensors


def bit_sum(tensor: Tensor) -> Tensor:
    """Return the sum of the tensor's bits, read as whole numbers: a scalar on its device."""
    flat = tensor.detach().contiguous().reshape(-1)
    size = next(size for size in WORDS if flat.nbytes % size == 0)  # the largest that fits, as they are the fastest
    if flat.storage_offset() * flat.element_size() % size:
        flat = flat.clone()  # words must be the same on all ranks, wherever the tensor lies
    return flat.view(torch.uint8).view(WORDS[size]).sum(dtype=torch.int64)


def _is_weight(piece: TensorShard) -> bool:
    """What forwards change is each rank's own. What is frozen is looked at too: memory lies there as well."""
    return piece.key.startswith("model/") and not piece.fluid and piece.tensor.numel() > 0


def _name(piece: TensorShard) -> int:
    """Return a number for the rectangle, the same on all ranks that hold it, and never 0."""
    text = f"{piece.key} {piece.start} {tuple(piece.tensor.shape)}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), signed=True) or 1


def _of_rank(rank: int, keys: tuple[str, ...]) -> tuple[str, ...]:
    """Return the keys as `rank` knows them, on all ranks: pipeline stages hold different ones."""
    letter = torch.zeros(4096, dtype=torch.uint8)
    text = "\n".join(keys).encode()[:4096]
    letter[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8) if text else letter[:0]
    dist.broadcast(letter, src=rank)
    return tuple(letter.numpy().tobytes().rstrip(b"\0").decode(errors="replace").split("\n"))
