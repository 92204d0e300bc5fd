"""Rules about lost time."""

from trimaran.doctor.evidence import Rule
from trimaran.doctor.rules.speed.bucket import bucket
from trimaran.doctor.rules.speed.checkpoint_stall import checkpoint_stall
from trimaran.doctor.rules.speed.communication_bound import communication_bound
from trimaran.doctor.rules.speed.data_bound import data_bound
from trimaran.doctor.rules.speed.host_limit import host_limit
from trimaran.doctor.rules.speed.host_sync import host_sync
from trimaran.doctor.rules.speed.imbalance import imbalance
from trimaran.doctor.rules.speed.launch_bound import launch_bound
from trimaran.doctor.rules.speed.memory_bound import memory_bound
from trimaran.doctor.rules.speed.padding import padding
from trimaran.doctor.rules.speed.prediction_off import prediction_off
from trimaran.doctor.rules.speed.recompilations import recompilations
from trimaran.doctor.rules.speed.scaling import scaling
from trimaran.doctor.rules.speed.straggler import straggler
from trimaran.doctor.rules.speed.uneven_stages import uneven_stages
from trimaran.doctor.rules.speed.unused_memory import unused_memory

RULES: tuple[Rule, ...] = (
    data_bound,
    communication_bound,
    launch_bound,
    host_limit,
    memory_bound,
    straggler,
    unused_memory,
    checkpoint_stall,
    recompilations,
    host_sync,
    bucket,
    uneven_stages,
    padding,
    imbalance,
    scaling,
    prediction_off,
)
