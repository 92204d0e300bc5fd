"""Which parameters are measured together: those of a layer, of an embedding, of a norm, of the head."""

import json
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import nn

from trimaran.core import Plan
from trimaran.nets import Network
from trimaran.parallel import RankMesh
from trimaran.parallel.axes.pp import StageMap, Trained, map_stages
from trimaran.train.metrics.group_norms import GroupMeter

MOST = 64  # groups in a line of the metrics
REST = "other"


def build_group_meter(
    networks: Sequence[Network], plan: Plan, ranks: RankMesh, trained: Trained, *, every: int
) -> GroupMeter | None:
    """Return what measures the groups of the network at every `every`-th update; None, where nothing is to be measured.

    Every rank must call.
    """
    if not every:
        return None
    groups = group_parameters(networks, map_stages(plan, ranks), trained)
    return GroupMeter(groups, every=every, pp=plan.mesh.pp, device=ranks.device)


def group_parameters(networks: Sequence[Network], stages: StageMap, trained: Trained) -> dict[str, list[nn.Parameter]]:
    """Return what is trained here by group. All ranks name the same groups, and may hold nothing of some.

    Every rank of the pipeline must call.
    """
    counted = {id(each) for each in trained.parameters}
    named = [
        (number, place_of(name), each)
        for number, network in zip(stages.here, networks, strict=True)
        for name, each in network.module.named_parameters()
        if id(each) in counted
    ]
    everywhere = _of_all_stages([(number, place) for number, place, _ in named], stages)
    group_of = joined([place for _, place in sorted(everywhere, key=lambda each: each[0])])
    groups: dict[str, list[nn.Parameter]] = {group: [] for group in group_of.values()}
    for _, place, each in named:
        groups[group_of[place]].append(each)
    return groups


def place_of(name: str) -> str:
    """Return the module that a parameter belongs to: its layer, the first that has a number, or else its own."""
    path = name.split(".")[:-1]
    numbered = next((depth for depth, part in enumerate(path) if part.isdigit()), len(path))
    return ".".join(path[: numbered + 1]) or name


def joined(places: Iterable[str], most: int = MOST) -> dict[str, str]:
    """Return the group of each place, in order. Where there are too many, neighbouring layers share one."""
    found = list(dict.fromkeys(places))
    runs: dict[str, list[int]] = {}
    for place in found:
        stem, _, number = place.rpartition(".")
        if number.isdigit():
            runs.setdefault(stem, []).append(int(number))
    longest = max(map(len, runs.values()), default=1)
    for size in range(1, longest + 1):
        groups = _joined_layers(found, runs, size)
        if len(set(groups.values())) <= most:
            return groups
    tops = list(dict.fromkeys(place.split(".")[0] for place in found))
    kept = set(tops if len(tops) <= most else tops[: most - 1])
    return {place: top if (top := place.split(".")[0]) in kept else REST for place in found}


def _joined_layers(places: Sequence[str], runs: dict[str, list[int]], size: int) -> dict[str, str]:
    """Return the group of each place, `size` neighbours of a run of layers in one."""
    groups = {place: place for place in places}
    for stem, numbers in runs.items():
        for start in range(0, len(numbers), size):
            together = numbers[start : start + size]
            first, last = together[0], together[-1]
            name = str(first) if len(together) == 1 else f"{first}-{last}"
            groups |= {_dotted(stem, each): _dotted(stem, name) for each in together}
    return groups


def _dotted(stem: str, name: object) -> str:
    return f"{stem}.{name}" if stem else str(name)


def _of_all_stages(mine: Sequence[tuple[int, str]], stages: StageMap) -> list[tuple[int, str]]:
    """Return what all ranks of the pipeline say. It travels as JSON: torch's object collectives would pickle it."""
    mine = list(dict.fromkeys(mine))
    num_ranks = stages.group.size()
    if num_ranks == 1:
        return mine
    text = json.dumps(mine).encode()
    size = torch.tensor(len(text))
    dist.all_reduce(size, op=dist.ReduceOp.MAX, group=stages.group)
    letter = torch.frombuffer(bytearray(text.ljust(int(size))), dtype=torch.uint8)
    coordinator = [torch.empty_like(letter) for _ in range(num_ranks)]
    dist.all_gather(coordinator, letter, group=stages.group)
    return [(number, place) for each in coordinator for number, place in json.loads(each.numpy().tobytes())]
