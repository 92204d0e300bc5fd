"""The order of nodes, and with it of ranks: nodes of one switch are neighbours.

Rings of NCCL, shards and pipeline stages connect neighbouring ranks, so that most of their traffic stays below one
switch.
"""

from collections.abc import Mapping, Sequence

TOPOLOGY = "TRIMARAN_TOPOLOGY"  # set on each node: its switches from the top, such as `spine1.leaf3`
SLURM_ADDRESS, SLURM_PATTERN = "SLURM_TOPOLOGY_ADDR", "SLURM_TOPOLOGY_ADDR_PATTERN"


def read_switches(environment: Mapping[str, str]) -> tuple[str, ...]:
    """Return the switches above this node, from the top: what the user says, else what Slurm does; empty if unknown.

    Slurm writes `spine1.leaf3.node17`, with the pattern `switch.switch.node`.
    """
    if given := environment.get(TOPOLOGY, ""):
        return tuple(given.split("."))
    parts, kinds = (environment.get(name, "").split(".") for name in (SLURM_ADDRESS, SLURM_PATTERN))
    return tuple(part for part, kind in zip(parts, kinds, strict=False) if kind == "switch" and part)


def order_nodes(switches: Mapping[str, Sequence[str]], *, first: str = "") -> list[str]:
    """Return the names of nodes by their switches and names. `first` comes first, and then those closest to it."""
    names = sorted(switches, key=lambda name: (*switches[name], name))
    if not first:
        return names
    return sorted(names, key=lambda name: (name != first, -_num_shared(switches[name], switches[first])))


def _num_shared(left: Sequence[str], right: Sequence[str]) -> int:
    """Return how many switches are the same, from the top."""
    pairs = [*zip(left, right, strict=False)]
    return next((level for level, (one, other) in enumerate(pairs) if one != other), len(pairs))
