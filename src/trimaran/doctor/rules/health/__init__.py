"""Rules about faults in numerics, memory, processes and hardware."""

from trimaran.doctor.evidence import Rule
from trimaran.doctor.rules.health.bad_samples import bad_samples
from trimaran.doctor.rules.health.compression_harm import compression_harm
from trimaran.doctor.rules.health.crash import crash
from trimaran.doctor.rules.health.debug_on import debug_on
from trimaran.doctor.rules.health.disk import disk
from trimaran.doctor.rules.health.expert_collapse import expert_collapse
from trimaran.doctor.rules.health.fragmentation import fragmentation
from trimaran.doctor.rules.health.gpu_memory_errors import gpu_memory_errors
from trimaran.doctor.rules.health.gpu_throttled import gpu_throttled
from trimaran.doctor.rules.health.gradient_explosion import gradient_explosion
from trimaran.doctor.rules.health.gradient_vanishing import gradient_vanishing
from trimaran.doctor.rules.health.hang import hang
from trimaran.doctor.rules.health.learning_rate_high import learning_rate_high
from trimaran.doctor.rules.health.learning_rate_low import learning_rate_low
from trimaran.doctor.rules.health.loss_scale_collapse import loss_scale_collapse
from trimaran.doctor.rules.health.loss_spike import loss_spike
from trimaran.doctor.rules.health.memory_growth import memory_growth
from trimaran.doctor.rules.health.memory_tight import memory_tight
from trimaran.doctor.rules.health.mismatch import mismatch
from trimaran.doctor.rules.health.network import network
from trimaran.doctor.rules.health.no_progress import no_progress
from trimaran.doctor.rules.health.not_finite import not_finite
from trimaran.doctor.rules.health.not_in_store import not_in_store
from trimaran.doctor.rules.health.out_of_memory import out_of_memory
from trimaran.doctor.rules.health.replicas_differ import replicas_differ
from trimaran.doctor.rules.health.swap import swap
from trimaran.doctor.rules.health.unused_parameters import unused_parameters
from trimaran.doctor.rules.health.warm_up import warm_up

RULES: tuple[Rule, ...] = (
    not_finite,
    loss_spike,
    gradient_explosion,
    gradient_vanishing,
    loss_scale_collapse,
    unused_parameters,
    learning_rate_high,
    learning_rate_low,
    warm_up,
    compression_harm,
    expert_collapse,
    fragmentation,
    memory_growth,
    memory_tight,
    out_of_memory,
    hang,
    mismatch,
    crash,
    no_progress,
    network,
    disk,
    not_in_store,
    gpu_throttled,
    gpu_memory_errors,
    swap,
    bad_samples,
    replicas_differ,
    debug_on,
)
