"""`python -m trimaran.machine.probe`: what torch sees and measures here and with other nodes, for the doctor.

It reads requests, one JSON object a line, and answers each with one. It is a separate process because the doctor does
not import torch. It computes nothing itself: the ranks that it forks do, so that it stays able to fork.
"""

import json
import logging
import sys
from collections.abc import Callable
from typing import Any

import torch

from trimaran.machine.probe.collective_calls import START_SECONDS, run_forked, write_line
from trimaran.machine.probe.probe_ranks import NodeRendezvous, cuda_versions, measure_all_reduce, measure_matmuls

Fields = dict[str, Any]


class ProbeServer:
    """Answers requests. Keeps the rendezvous with other nodes from one request to the next."""

    def __init__(self) -> None:
        self._nodes: NodeRendezvous | None = None

    def versions(self, request: Fields) -> Fields:
        """Return torch's versions and CUDA architectures. A child asks CUDA, as this process must stay able to fork."""
        versions: Fields = {"torch": torch.__version__, "cuda": torch.version.cuda or "", "archs": []}
        if request["kind"] == "cuda":
            (from_child,) = run_forked(cuda_versions, [()], seconds=START_SECONDS)
            versions |= from_child or {"error": "CUDA does not answer"}
        return versions

    def matmuls(self, request: Fields) -> Fields:
        sizes = {name: request[name] for name in ("devices", "cores", "seconds")}
        return measure_matmuls(request["kind"], **sizes)

    def all_reduce(self, request: Fields) -> Fields:
        return measure_all_reduce(request["kind"], request["ranks"], seconds=request["seconds"])

    def rendezvous(self, request: Fields) -> Fields:
        """Meet the other nodes; return all host names and, on node 0, how far the clocks differ."""
        address, nodes, node = (request[name] for name in ("address", "nodes", "node"))
        self._nodes = NodeRendezvous(address, nodes, node, seconds=request["seconds"])
        return {"names": self._nodes.names, "skews": self._nodes.skews}

    def pairs(self, request: Fields) -> Fields:
        pairs = [(left, right) for left, right in request["pairs"]]
        assert self._nodes is not None, "`rendezvous` comes first"
        return {"seconds": self._nodes.measure(pairs, kind=request["kind"], devices=request["devices"])}

    def gather(self, request: Fields) -> Fields:
        assert self._nodes is not None, "`rendezvous` comes first"
        return {"others": self._nodes.gather(request["value"])}


REQUESTS: dict[str, Callable[[ProbeServer, Fields], Fields]] = {
    "versions": ProbeServer.versions,
    "matmuls": ProbeServer.matmuls,
    "all_reduce": ProbeServer.all_reduce,
    "rendezvous": ProbeServer.rendezvous,
    "pairs": ProbeServer.pairs,
    "gather": ProbeServer.gather,
}


def main() -> int:
    logging.basicConfig(level=logging.WARNING)
    probe = ProbeServer()
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer = REQUESTS[request["do"]](probe, request)
        except Exception as error:  # is the answer: the doctor continues with its other checks
            answer = {"error": f"{type(error).__name__}: {error}".splitlines()[0]}
        write_line(**answer)
    return 0


if __name__ == "__main__":
    sys.exit(main())
