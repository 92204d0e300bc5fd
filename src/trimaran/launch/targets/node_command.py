"""The command that every target starts once on each node: the node's supervisor."""

from trimaran.launch.targets.target import LaunchRequest


def node_command(
    request: LaunchRequest, *, python: str, launch_folder: str = "", address: str = "", nodes: int = 0
) -> list[str]:
    """Return the command of a node's supervisor, the same on every node.

    The supervisor finds its own address unless `address` is given. If the run directory does not exist yet, the first
    node creates it from the recipe and plan in `launch_folder`, a path on the node. `nodes` is how many can take part
    on a target that gets no more of them; by default those that hold the most ranks of `faults.ranks`. The run starts
    with those of the cluster, and grows when more join.
    """
    nodes = nodes or request.max_nodes
    command = [python, "-m", "trimaran.launch", str(request.run_dir)]
    if launch_folder:
        command.append(f"--create-from={launch_folder}")
    if nodes > 1:
        command += [f"--nodes={nodes}", f"--ranks-per-node={request.ranks_per_node}"]
        command += [f"--address={address or 'auto'}"]
    if request.min_nodes < nodes:
        command.append(f"--min-nodes={request.min_nodes}")
    if request.num_nodes < nodes:
        command.append(f"--start-nodes={request.num_nodes}")
    if not request.check:
        command.append("--no-check")
    return command
