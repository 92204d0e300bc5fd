"""Public names of `trimaran.probe`, and the modules that they come from. They are imported on first use."""

from .calibrate_disk import measure_disk as measure_disk
from .collective_calls import CommGroup as CommGroup, count_wrong as count_wrong
from .measure_comm import measure as measure
from .measure_cpu import stopped as stopped
from .probe_nodes import NodeRendezvous as NodeRendezvous, PAIR_SECONDS as PAIR_SECONDS
from .probe_ranks import (
    count_wrong_values as count_wrong_values, measure_all_reduce as measure_all_reduce,
    measure_matmuls as measure_matmuls, run_forked as run_forked,
)
