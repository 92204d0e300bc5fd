"""Public names of `trimaran.drill`, and the modules that they come from. They are imported on first use."""

from .disk_fill import (
    MAX_FILL_BYTES as MAX_FILL_BYTES, filled_disk as filled_disk, refuse_shared_disk as refuse_shared_disk,
)
from .drill_run import (
    RunObserver as RunObserver, drills_file as drills_file, is_own as is_own, mark_as_own as mark_as_own,
)
from .fault_kinds import (
    DrillFault as DrillFault, FaultName as FaultName, KINDS as KINDS, parse_kill_in_change as parse_kill_in_change,
    parse_slow as parse_slow,
)
from .find_processes import find_processes as find_processes
from .inject import INJECTIONS as INJECTIONS, damage_checkpoint as damage_checkpoint, inject as inject
from .measure import DrillResult as DrillResult, Observed as Observed, is_complete as is_complete, judge as judge
