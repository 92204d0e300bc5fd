"""Public names of `trimaran.loop`, and the modules that they come from. They are imported on first use."""

from .loss_reduction import (
    accumulation_divisor as accumulation_divisor, check_divisor as check_divisor, check_reduction as
    check_reduction, reduction_of as reduction_of,
)
from .row_dependence import mark_outputs as mark_outputs, row_dependence as row_dependence
