"""Groups the parameters whose norms are measured together: by layer, embedding, norm and head."""

from collections.abc import Iterable, Sequence

from torch import nn

from trimaran.core import Plan
from trimaran.nets import Network
from trimaran.optim import SplitWeights
from trimaran.parallel import RankMesh
from trimaran.parallel.axes.stage_map import StageMap, TrainedParameters, map_stages
from trimaran.parallel.comm.json_exchange import all_gather_json
from trimaran.train.metrics.group_norms import GroupMeter

MAX_GROUPS = 64  # in a metrics line
OTHER_GROUP = "other"


def build_group_meter(
    networks: Sequence[Network],
    plan: Plan,
    ranks: RankMesh,
    trained: TrainedParameters,
    split: SplitWeights,
    *,
    every: int,
) -> GroupMeter | None:
    """Return a meter that measures every `every`-th update; None if `every` is 0. Every rank must call it."""
    if not every:
        return None
    groups = group_parameters(networks, map_stages(plan, ranks), trained)
    return GroupMeter(groups, split, every=every, pp=plan.mesh.pp, device=ranks.device)


def group_parameters(
    networks: Sequence[Network], stages: StageMap, trained: TrainedParameters
) -> dict[str, list[nn.Parameter]]:
    """Return this rank's trained parameters by group. All ranks have the same groups, some of them perhaps empty.

    Every rank of the pipeline must call it.
    """
    counted = {id(each) for each in trained.parameters}
    named = [
        (number, module_of(name), each)
        for number, network in zip(stages.here, networks, strict=True)
        for name, each in network.module.named_parameters()
        if id(each) in counted
    ]
    everywhere = _gather_from_stages([(number, module) for number, module, _ in named], stages)
    group_of = merge_layers([module for _, module in sorted(everywhere, key=lambda each: each[0])])
    groups: dict[str, list[nn.Parameter]] = {group: [] for group in group_of.values()}
    for _, module, each in named:
        groups[group_of[module]].append(each)
    return groups


def module_of(name: str) -> str:
    """Return the module of a parameter: the first one with a number (its layer), or else the one that holds it."""
    path = name.split(".")[:-1]
    numbered = next((depth for depth, part in enumerate(path) if part.isdigit()), len(path))
    return ".".join(path[: numbered + 1]) or name


def merge_layers(modules: Iterable[str], max_groups: int = MAX_GROUPS) -> dict[str, str]:
    """Return the group of each module, in order. If there are too many groups, neighbouring layers share one."""
    unique = list(dict.fromkeys(modules))
    layers: dict[str, list[int]] = {}
    for module in unique:
        stem, _, number = module.rpartition(".")
        if number.isdigit():
            layers.setdefault(stem, []).append(int(number))
    longest = max(map(len, layers.values()), default=1)
    for size in range(1, longest + 1):
        groups = _merge_neighbours(unique, layers, size)
        if len(set(groups.values())) <= max_groups:
            return groups
    roots = list(dict.fromkeys(module.split(".")[0] for module in unique))
    shown = set(roots if len(roots) <= max_groups else roots[: max_groups - 1])
    return {module: root if (root := module.split(".")[0]) in shown else OTHER_GROUP for module in unique}


def _merge_neighbours(modules: Sequence[str], layers: dict[str, list[int]], size: int) -> dict[str, str]:
    """Return the group of each module, with `size` consecutive layers in one group."""
    groups = {module: module for module in modules}
    for stem, numbers in layers.items():
        for start in range(0, len(numbers), size):
            merged = numbers[start : start + size]
            first, last = merged[0], merged[-1]
            name = str(first) if len(merged) == 1 else f"{first}-{last}"
            groups |= {_dotted(stem, each): _dotted(stem, name) for each in merged}
    return groups


def _dotted(stem: str, name: object) -> str:
    return f"{stem}.{name}" if stem else str(name)


def _gather_from_stages(mine: Sequence[tuple[int, str]], stages: StageMap) -> list[tuple[int, str]]:
    """Return the pairs of all ranks of the pipeline, in rank order."""
    mine = list(dict.fromkeys(mine))
    if stages.group.size() == 1:
        return mine
    return [(number, module) for pairs in all_gather_json(mine, stages.group) for number, module in pairs]
