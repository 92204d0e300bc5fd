"""Public names of `trimaran.rehearse`, and the modules that they come from. They are imported on first use."""

from .absent_ranks import stage_facts_of as stage_facts_of
from .fewer_layers import (
    extrapolated as extrapolated, refuse_fewer_layers as refuse_fewer_layers, with_layers as with_layers,
)
from .rank_process import run_rank as run_rank
from .rank_task import MeasuredRank as MeasuredRank, RankAnswer as RankAnswer, RankTask as RankTask
from .rehearsal import (
    RehearsalRequest as RehearsalRequest, RehearsedRank as RehearsedRank, compose_step as compose_step,
    predicted_rank as predicted_rank,
)
from .rehearsal_group import BACKEND as BACKEND, MESSAGE_BLOCK as MESSAGE_BLOCK, register_backend as register_backend
from .rehearsed_rank import measure_rank as measure_rank, rehearse_rank as rehearse_rank
from .tensor_peak import measured_tensors as measured_tensors
