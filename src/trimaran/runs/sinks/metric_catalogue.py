"""Every Prometheus metric of a run: its kind, its help text, and its labels besides `run`.

All share one prefix and use base units; counters end in `_total`. Label values come from a small set, or are a rank, a
node or a GPU: never a step, a path or a message. With more than `MAX_INDIVIDUAL_SERIES` ranks or GPUs, `stat` is min,
median or max, and only the outliers keep their own series (`summarise_many`).
"""

from dataclasses import dataclass
from typing import Literal

MAX_INDIVIDUAL_SERIES = 64  # of ranks, nodes or GPUs per metric
MAX_SERIES_PER_METRIC = 512  # further ones are dropped and counted

MetricKind = Literal["gauge", "counter", "summary", "histogram"]


@dataclass(frozen=True, slots=True)
class Metric:
    kind: MetricKind
    meaning: str
    labels: tuple[str, ...] = ()


# Steps longer than ten minutes share one bucket.
STEP_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 60.0, 150.0, 600.0)

RANK = ("rank", "stat")
GPU = ("node", "gpu", "uuid", "stat")

PROGRESS = {
    "build_info": Metric("gauge", "always 1; the label is Trimaran's version", ("version",)),
    "attempt_info": Metric("gauge", "always 1; the labels describe the current attempt", ("attempt", "world_size")),
    "attempts": Metric("counter", "attempts, including restarts"),
    "finished": Metric("gauge", "1 after the last step, or after a requested stop"),
    "step": Metric("gauge", "the last finished optimizer step"),
    "steps_planned": Metric("gauge", "the step at which the run ends"),
    "steps": Metric("counter", "optimizer steps, including replayed ones"),
    "replayed_steps": Metric("counter", "optimizer steps that were replayed after a restart or a rewind"),
    "last_step_timestamp_seconds": Metric("gauge", "Unix time of the end of the last step"),
    "step_duration_seconds": Metric("histogram", "wall-clock time of an optimizer step"),
    "phase_duration_seconds": Metric("summary", "wall-clock time of a phase of a step on rank 0", ("phase",)),
    "host_duration_seconds": Metric("summary", "time that the host of rank 0 takes to issue a step"),
    "tokens": Metric("counter", "trained tokens, including replayed steps"),
    "samples": Metric("counter", "trained sequences, including replayed steps"),
    "mfu_ratio": Metric("gauge", "model FLOPs utilization: model FLOP/s over the devices' peak"),
    "hfu_ratio": Metric("gauge", "hardware FLOPs utilization: as MFU, with recompute included"),
    "goodput_ratio": Metric("gauge", "compute and communication of steps not replayed, over the time without idle"),
    "time_seconds": Metric("gauge", "wall-clock time since launch, by category", ("category",)),
}

LEARNING = {
    "loss": Metric("gauge", "mean loss over the valid tokens of the global batch, in nats"),
    "part_loss": Metric("gauge", "mean loss of one source of samples or one head", ("part",)),
    "gradient_norm": Metric("gauge", "norm of the gradient before clipping"),
    "learning_rate": Metric("gauge", "learning rate of the step"),
    "group_learning_rate": Metric("gauge", "learning rate of a tower or parameter group", ("group",)),
    "group_gradient_norm": Metric("gauge", "norm of the gradient of a group of modules", ("group",)),
    "group_update_ratio": Metric("gauge", "norm of the update over the norm of the weights", ("group",)),
    "loss_scale": Metric("gauge", "fp16 loss scale"),
    "compression_error_ratio": Metric("gauge", "error of the sum of compressed gradients, relative to it"),
    "skipped_steps": Metric("counter", "skipped updates", ("reason",)),
    "bad_samples": Metric("counter", "unusable samples"),
    "recompiles": Metric("counter", "recompilations after the first steps"),
}

INCIDENTS = {
    "restarts": Metric("counter", "incidents that restarted the ranks", ("cause",)),
    "incidents": Metric("counter", "incidents", ("kind", "severity")),
    "checkpoints": Metric("counter", "complete checkpoints"),
    "checkpoint_stall_seconds": Metric("counter", "time that training stalled for checkpoints"),
    "checkpoint_last_success_timestamp_seconds": Metric("gauge", "Unix time of the newest complete checkpoint"),
    "checkpoint_interval_seconds": Metric("gauge", "the longest of the last five intervals between checkpoints"),
    "checkpoint_duration_seconds": Metric("gauge", "time to write the newest checkpoint"),
    "checkpoint_bytes": Metric("gauge", "size of the newest checkpoint"),
    "dropped_series": Metric("counter", "series that were dropped because a metric had too many"),
}

AUTOPILOT = {
    "decisions": Metric("counter", "decisions of the autopilot that came to this outcome", ("outcome",)),
    "trial_seconds": Metric("gauge", "time that the autopilot's trials have cost: pauses and longer steps"),
    "decision_expected_gain_ratio": Metric("gauge", "fraction of a step that the last tried change should save"),
    "decision_measured_gain_ratio": Metric("gauge", "fraction of a step that the last tried change saves"),
}

RESOURCES = {
    "memory_bytes": Metric("gauge", "memory of rank 0's device", ("kind",)),
    "memory_fragmentation_ratio": Metric("gauge", "fraction of reserved memory that is free but fragmented"),
    "allocator_retries": Metric("counter", "allocation retries after freeing cached memory"),
    "ooms": Metric("counter", "out-of-memory errors on rank 0's device"),
    "collective_wait_seconds": Metric("summary", "exposed time in collectives per step", ("group",)),
    "axis_wait_seconds": Metric("summary", "exposed communication of an axis per step on rank 0", ("axis",)),
    "data_wait_seconds": Metric("summary", "wait for the batch per step"),
    "straggler_wait_seconds": Metric("summary", "wait for the slowest rank per step"),
    "straggler_score_ratio": Metric("gauge", "own work of the median rank over that of the slowest; 1 means balanced"),
    "rank_busy_seconds": Metric("gauge", "a rank's own work per step", ("stat",)),
    "rank_data_seconds": Metric("gauge", "a rank's wait for its batch", ("stat",)),
    "rank_wait_seconds": Metric("gauge", "a rank's wait for other ranks", ("stat",)),
    "rank_peak_bytes": Metric("gauge", "a rank's peak memory", ("stat",)),
    "rank_outlier_ratio": Metric("gauge", "value of an outlier rank over the median rank", ("rank", "what")),
    "rank_cpu_cores": Metric("gauge", "CPU cores used by a rank", RANK),
    "rank_loader_cpu_cores": Metric("gauge", "CPU cores used by a rank's loader processes", RANK),
    "rank_memory_bytes": Metric("gauge", "host memory of a rank", RANK),
    "node_cpu_ratio": Metric("gauge", "fraction of all cores that is busy", ("node", "stat")),
    "node_memory_bytes": Metric("gauge", "host memory", ("node", "kind", "stat")),
    "node_disk_bytes_per_second": Metric("gauge", "disk traffic", ("node", "direction", "stat")),
    "node_network_bytes_per_second": Metric("gauge", "network traffic", ("node", "direction", "stat")),
    "disk_free_bytes": Metric("gauge", "free space on the run's disk", ("node", "stat")),
    "gpu_utilisation_ratio": Metric("gauge", "fraction of time in which a kernel ran", GPU),
    "gpu_memory_bytes": Metric("gauge", "GPU memory, of all processes", (*GPU, "kind")),
    "gpu_power_watts": Metric("gauge", "power drawn", GPU),
    "gpu_power_limit_watts": Metric("gauge", "power limit", GPU),
    "gpu_temperature_celsius": Metric("gauge", "temperature", GPU),
    "gpu_sm_clock_hertz": Metric("gauge", "SM clock", GPU),
    "gpu_sm_clock_max_hertz": Metric("gauge", "highest SM clock", GPU),
    "gpu_ecc_uncorrected": Metric("gauge", "uncorrected ECC memory errors so far", GPU),
    "gpu_throttled": Metric("gauge", "throttled GPUs by reason", ("reason",)),
}

CATALOGUE = PROGRESS | LEARNING | INCIDENTS | AUTOPILOT | RESOURCES
