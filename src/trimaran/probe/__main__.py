"""`python -m trimaran.probe`: what torch sees and measures on this machine, and with other nodes, for the doctor.

It reads orders, one JSON object a line, and answers each with one. A process of its own, because only the worker's
rooms know torch; it computes nothing itself but forks ranks that do, so that it can fork again.
"""

import json
import logging
import sys
from collections.abc import Callable
from typing import Any

import torch

from trimaran.probe.probe_nodes import NodeRendezvous
from trimaran.probe.probe_ranks import START_SECONDS, measure_products, measure_sums, run_forked, see_cuda

Answer = dict[str, Any]


class ProbeServer:
    """Carries orders out; what it keeps between them is the meeting with other nodes."""

    def __init__(self) -> None:
        self._meeting: NodeRendezvous | None = None

    def look(self, order: Answer) -> Answer:
        """Return versions and what torch has kernels for. A child asks CUDA: who has may no longer fork."""
        found: Answer = {"torch": torch.__version__, "cuda": torch.version.cuda or "", "archs": []}
        if order["kind"] == "cuda":
            (seen,) = run_forked(see_cuda, [()], seconds=START_SECONDS)
            found |= seen or {"error": "CUDA does not answer"}
        return found

    def products(self, order: Answer) -> Answer:
        return measure_products(order["kind"], devices=order["devices"], cores=order["cores"], seconds=order["seconds"])

    def sums(self, order: Answer) -> Answer:
        return measure_sums(order["kind"], order["ranks"], seconds=order["seconds"])

    def meet(self, order: Answer) -> Answer:
        """Find the other nodes. What they told of themselves comes back on node 0."""
        self._meeting = NodeRendezvous(order["address"], order["nodes"], order["node"], seconds=order["seconds"])
        return {"names": self._meeting.names, "skews": self._meeting.skews}

    def pairs(self, order: Answer) -> Answer:
        meeting = self._met()
        pairs = [(left, right) for left, right in order["pairs"]]
        return {"seconds": meeting.measure(pairs, kind=order["kind"], devices=order["devices"])}

    def share(self, order: Answer) -> Answer:
        return {"others": self._met().share(order["value"])}

    def _met(self) -> NodeRendezvous:
        assert self._meeting is not None, "nodes meet before they measure"
        return self._meeting


ORDERS: dict[str, Callable[[ProbeServer, Answer], Answer]] = {
    "look": ProbeServer.look,
    "products": ProbeServer.products,
    "sums": ProbeServer.sums,
    "meet": ProbeServer.meet,
    "pairs": ProbeServer.pairs,
    "share": ProbeServer.share,
}


def main() -> int:
    logging.basicConfig(level=logging.WARNING)
    probe = ProbeServer()
    for line in sys.stdin:
        order = json.loads(line)
        try:
            answer = ORDERS[order["do"]](probe, order)
        except Exception as error:  # whatever goes wrong is the answer: the doctor goes on with its other looks
            answer = {"error": f"{type(error).__name__}: {error}".splitlines()[0]}
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
