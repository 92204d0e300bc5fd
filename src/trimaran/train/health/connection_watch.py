"""Watches the ports and file descriptors of a rank: strangers that connect again and again, and leaks."""

import os
import resource
import time

from trimaran.runs import Journal
from trimaran.runs.gloo_listeners import count_refused_packets

CHECK_SECONDS = 5.0
MIN_REFUSED_PACKETS = 100  # fewer are a port scan, or one program that tries in vain
REPORT_FACTOR = 10  # report again when there are this many times as many
MAX_DESCRIPTOR_FRACTION = 0.8  # of the limit


class ConnectionWatch:
    """Writes a `connections` event when strangers flood the rank's ports, or when it runs out of descriptors."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._due = 0.0
        self._next_refused = MIN_REFUSED_PACKETS
        self._few_descriptors = False

    def check(self, step: int) -> None:
        """Look at most every 5 seconds; a look takes a millisecond or two."""
        if (now := time.monotonic()) < self._due:
            return
        self._due = now + CHECK_SECONDS
        refused, used = count_refused_packets(), len(os.listdir("/proc/self/fd"))
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        are_few = limit != resource.RLIM_INFINITY and used > MAX_DESCRIPTOR_FRACTION * limit
        if refused >= self._next_refused or (are_few and not self._few_descriptors):
            self._journal.event("connections", step=step, refused=refused, descriptors=used, limit=limit)
        if refused >= self._next_refused:
            self._next_refused = REPORT_FACTOR * refused
        self._few_descriptors = are_few
