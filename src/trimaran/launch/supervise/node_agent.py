"""This machine's part of a run on several machines: its node, its channel and its preflight check."""

import os

from trimaran.core import Plan
from trimaran.launch.supervise import link_probe
from trimaran.launch.supervise.channel import Channel
from trimaran.launch.supervise.fork_server_process import ForkServerProcess
from trimaran.launch.supervise.head_client import OPERATION, answer_not_ready
from trimaran.launch.supervise.local_node import LocalNode
from trimaran.launch.supervise.node_options import NodeOptions, split_head
from trimaran.launch.supervise.preflight_process import PreflightProcess
from trimaran.launch.supervise.replan import cluster_of
from trimaran.runs import RunDirectory
from trimaran.runs.lease import run_token
from trimaran.runs.rank_environment import without_unusable, worker_environment


class NodeAgent:
    """Lives as long as this machine takes part, as coordinator or follower: the rank memories outlive role changes.

    Make it in the thread that stays to the end, see `LocalNode`. `check`: check whether the run can work here.
    """

    def __init__(
        self,
        run: RunDirectory,
        node_options: NodeOptions,
        *,
        check: bool = True,
        fork_server: ForkServerProcess | None = None,
    ) -> None:
        self.run, self.node_options = run, node_options
        self.token, self.recipe = run_token(run), run.read_recipe()
        plan, interface = run.read_plan(), node_options.interface
        device = cluster_of(self.recipe, plan.mesh.world_size).device
        self.kind, self._on_cpu = device.kind, device.traits.shares_cores
        num_ranks = node_options.ranks or -(-plan.mesh.world_size // node_options.num_at_start)
        nodes, where = -(-plan.mesh.world_size // num_ranks), f"node {node_options.name}"
        self.preflight = PreflightProcess(run, kind=self.kind, nodes=nodes, where=where) if check else None
        ours = {
            "GLOO_SOCKET_IFNAME": interface,
            "NCCL_SOCKET_IFNAME": interface,
            "OMP_NUM_THREADS": str(max(1, len(os.sched_getaffinity(0)) // num_ranks)),
        }
        self.per_node, given = frozenset(ours), without_unusable(os.environ)
        self.is_head = node_options.own_disk and node_options.is_head
        port = split_head(node_options.head)[1] if self.is_head else 0
        self.channel = Channel(node_options.address, self.token, port=port, own_node=node_options.name)
        self.channel.streams[link_probe.OPERATION] = link_probe.serve_link
        if self.is_head:
            self.channel.operations[OPERATION] = answer_not_ready
        alone = {"TRIMARAN_OWN_DISK": node_options.name} if node_options.own_disk else {}
        self.node = LocalNode(
            run,
            num_ranks=num_ranks,
            environment={
                **(os.environ | self.environment(plan)),
                **{name: given.get(name, ours[name]) for name in ours},
                **alone,
            },
            faults=self.recipe.faults,
            name=node_options.name,
            fork_server=fork_server,
        )

    def environment(self, plan: Plan) -> dict[str, str]:
        """Return the variables of the ranks of `plan` on top of our environment."""
        deterministic, debug = self.recipe.train.deterministic, self.recipe.faults.debug
        return worker_environment(os.environ, plan, on_cpu=self._on_cpu, deterministic=deterministic, debug=debug)

    def close(self) -> None:
        if self.preflight is not None:
            self.preflight.cancel()
        self.node.close()
        self.channel.close()
