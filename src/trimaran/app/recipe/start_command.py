"""The words before `train` in a command that this machine, or every node of a cluster, runs."""

from trimaran.app.recipe.options import program_name
from trimaran.machine import Cluster


def start_command(cluster: Cluster) -> list[str]:
    """Return what precedes `train` in the command; several nodes need torchrun on each, with a common rendezvous."""
    if cluster.num_nodes == 1:
        return [program_name()]
    ranks = [f"--nnodes={cluster.num_nodes}", f"--nproc-per-node={cluster.devices_per_node}"]
    return ["torchrun", *ranks, "--rdzv-backend=c10d", "--rdzv-endpoint=FIRST_NODE:29500", "-m", "trimaran"]
