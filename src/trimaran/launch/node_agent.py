"""This machine's part of a run on several: its node, its channel, and who it is to the others."""

import os

from trimaran.core import Plan
from trimaran.launch.channel import Channel
from trimaran.launch.local import worker_environment
from trimaran.launch.local_node import LocalNode
from trimaran.launch.node_options import NodeOptions
from trimaran.launch.preflight_process import PreflightProcess
from trimaran.launch.replan import cluster_of
from trimaran.run import RunDirectory
from trimaran.run.lease import token_of


class NodeAgent:
    """Made once, whichever role this machine plays: the memory of its ranks outlives every change of roles.

    Make it in the thread that stays to the end, see `LocalNode`. `check`: look whether the run could work here.
    """

    def __init__(self, run: RunDirectory, node_options: NodeOptions, *, check: bool = True) -> None:
        self.run, self.node_options = run, node_options
        self.token, self.recipe = token_of(run), run.read_recipe()
        plan, interface = run.read_plan(), node_options.interface
        kind = cluster_of(self.recipe, plan.mesh.world_size).device.kind
        self._on_cpu = kind == "cpu"
        here = node_options.ranks or -(-plan.mesh.world_size // node_options.nodes)
        nodes, where = -(-plan.mesh.world_size // here), f"node {node_options.name}"
        self.look = PreflightProcess(run, kind=kind, nodes=nodes, where=where) if check else None
        ours = {
            "GLOO_SOCKET_IFNAME": interface,
            "NCCL_SOCKET_IFNAME": interface,
            "OMP_NUM_THREADS": str(max(1, len(os.sched_getaffinity(0)) // here)),
        }
        self.per_node = frozenset(ours)
        self.channel = Channel(node_options.address, self.token, own_node=node_options.name)
        self.node = LocalNode(
            run,
            num_ranks=here,
            environment=os.environ | self.environment(plan) | {name: os.environ.get(name, ours[name]) for name in ours},
            faults=self.recipe.faults,
            name=node_options.name,
        )

    def environment(self, plan: Plan) -> dict[str, str]:
        """Return what ranks of `plan` find in their environment on top of ours."""
        deterministic = self.recipe.train.deterministic
        return worker_environment(os.environ, plan, on_cpu=self._on_cpu, deterministic=deterministic)

    def close(self) -> None:
        if self.look is not None:
            self.look.end()
        self.node.close()
        self.channel.close()
