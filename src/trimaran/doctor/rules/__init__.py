"""The rules that diagnose a run, a module for each topic. `RULES` lists them all."""

from trimaran.doctor.evidence import Rule
from trimaran.doctor.rules import balance, communication, compute, data, failures, hardware, memory, numerics, storage

RULES: tuple[Rule, ...] = (
    numerics.not_finite,  # F050: NaN or Inf in the loss or gradients, and the module that first produced it
    numerics.gradient_explosion,  # F052: the gradient norm explodes
    numerics.gradient_vanishing,  # F053: some modules get almost no gradient
    numerics.loss_scale_collapse,  # F054: the fp16 loss scale collapses
    numerics.unused_parameters,  # F055: trained parameters get no gradient
    numerics.replicas_differ,  # F073: replicas of the weights differ, or a rank's memory changed between two updates
    numerics.loss_spike,  # F051: the loss spikes
    numerics.learning_rate_high,  # F056: the learning rate is too high
    numerics.learning_rate_low,  # F057: the learning rate is too low
    numerics.warm_up,  # F058: the loss rises at the start, without learning-rate warm-up
    numerics.compression_harm,  # F075: compressed gradients hurt training
    balance.straggler,  # F005: a straggler: one rank is slower than the others, and all wait for it
    balance.imbalance,  # F013: tokens or image patches are unevenly distributed over ranks
    balance.uneven_stages,  # F011: the stages of a pipeline are uneven
    balance.expert_collapse,  # F076: the router of a mixture of experts has collapsed to few experts
    communication.communication_bound,  # F002: exposed communication
    communication.bucket,  # F010: the gradient bucket size is wrong
    communication.scaling,  # F014: the run scales worse than predicted
    compute.launch_bound,  # F003: the device waits for kernel launches
    compute.host_limit,  # F016: the host limits the step
    compute.host_sync,  # F009: host-device synchronisation inside a step
    compute.memory_bound,  # F004: compute is memory-bound
    compute.recompilations,  # F008: torch.compile recompiles repeatedly
    compute.prediction_off,  # F015: the run differs from its prediction
    compute.debug_on,  # F078: the run is slow because debugging is switched on
    data.data_bound,  # F001: training waits for data
    data.padding,  # F012: much of the compute is padding
    data.bad_samples,  # F072: many samples are unusable
    memory.fragmentation,  # F060: GPU memory is fragmented, or allocation retries slow the run down
    memory.memory_tight,  # F061: memory is almost full, and a larger batch may run out
    memory.out_of_memory,  # F062: memory ran out; what held it, and the cheapest fix
    memory.memory_growth,  # F077: the memory of a rank grows without bound
    memory.unused_memory,  # F006: unused device memory could make steps shorter
    storage.checkpoint_stall,  # F007: checkpoints stall training
    storage.disk,  # F068: the run's disk is full, or will be soon
    storage.not_in_store,  # F074: checkpoints do not reach the object store, or not all of them
    hardware.gpu_throttled,  # F069: a GPU is throttled, or runs at a low clock
    hardware.gpu_memory_errors,  # F070: a GPU has uncorrected ECC memory errors
    hardware.swap,  # F071: a node swaps memory to disk
    failures.hang,  # F063: a rank hung
    failures.mismatch,  # F064: ranks called different collectives
    failures.crash,  # F065: a process died
    failures.no_progress,  # F066: restarts bring no progress
    failures.network,  # F067: ranks or nodes lost their connection
)
