"""The nodes of a Ray cluster on this machine: `python -m tests.ray_nodes NUMBER`.

It prints the address of its job API, and reads commands: `add` adds a node, `remove ADDRESS` kills one at once.
"""

import json
import sys
from typing import Any

from ray.cluster_utils import Cluster


def main(num_nodes: int) -> None:
    def settings(number: int) -> dict[str, Any]:
        return {"num_cpus": 1, "node_ip_address": f"127.0.0.{number}"}

    head = settings(2) | {"include_dashboard": True, "dashboard_host": "127.0.0.1", "dashboard_port": 0}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    nodes = {f"127.0.0.{number}": cluster.add_node(**settings(number)) for number in range(3, num_nodes + 2)}
    print(json.dumps({"address": f"http://{cluster.webui_url}"}), flush=True)
    number = num_nodes + 2
    for line in sys.stdin:
        match line.split():
            case ["add"]:
                nodes[f"127.0.0.{number}"] = cluster.add_node(**settings(number))
                print(json.dumps({"node": f"127.0.0.{number}"}), flush=True)
                number += 1
            case ["remove", address]:
                cluster.remove_node(nodes.pop(address), allow_graceful=False)
                print(json.dumps({"node": address}), flush=True)
    cluster.shutdown()


if __name__ == "__main__":
    main(int(sys.argv[1]))
