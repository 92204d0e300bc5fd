"""Every metric that a run shows to Prometheus: its kind, what it means, and its labels besides `run`.

One prefix, base units, `_total` for counters. A label is a small set of words, a rank, a node or a GPU: never a step, a
path or a text. Where there are more than `MOST_EACH` ranks or GPUs, `stat` is min, median or max and the few that are
farthest from the median keep series of their own (see `spread.py`).
"""

from dataclasses import dataclass
from typing import Literal

MOST_EACH = 64
MOST_SERIES = 512  # of one metric: what comes after is dropped, and counted

MetricKind = Literal["gauge", "counter", "summary", "histogram"]


@dataclass(frozen=True, slots=True)
class Metric:
    kind: MetricKind
    meaning: str
    labels: tuple[str, ...] = ()


# The longest step that is told from a longer one takes ten minutes.
STEP_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 60.0, 150.0, 600.0)

RANK = ("rank", "stat")
GPU = ("node", "gpu", "uuid", "stat")

PROGRESS = {
    "build_info": Metric("gauge", "always 1: the version that trains", ("version",)),
    "attempt_info": Metric("gauge", "always 1: the start of the ranks that is under way", ("attempt", "world_size")),
    "attempts": Metric("counter", "starts of the ranks"),
    "finished": Metric("gauge", "1 once all steps are done, or the run was asked to stop"),
    "step": Metric("gauge", "the last optimizer step that was done"),
    "steps_planned": Metric("gauge", "the step at which the run ends"),
    "steps": Metric("counter", "optimizer steps, those that were done again among them"),
    "replayed_steps": Metric("counter", "optimizer steps that had been done before a restart or a rewind"),
    "last_step_timestamp_seconds": Metric("gauge", "when the last step ended, since the epoch"),
    "step_duration_seconds": Metric("histogram", "wall clock of an optimizer step"),
    "phase_duration_seconds": Metric("summary", "wall clock of a phase of a step, as rank 0 saw it", ("phase",)),
    "tokens": Metric("counter", "tokens that were trained on, replays among them"),
    "samples": Metric("counter", "sequences that were trained on, replays among them"),
    "mfu_ratio": Metric("gauge", "model FLOP/s over the peak of the devices"),
    "hfu_ratio": Metric("gauge", "as mfu, with what recompute computes again"),
    "goodput_ratio": Metric(
        "gauge", "compute and communication of steps that count over the time somebody ran the run"
    ),
    "time_seconds": Metric("gauge", "the time since launch by what it went to", ("category",)),
}

LEARNING = {
    "loss": Metric("gauge", "mean loss over the valid tokens of the global batch, in nats"),
    "part_loss": Metric("gauge", "mean loss of one source of samples or one head", ("part",)),
    "gradient_norm": Metric("gauge", "norm of the gradient before clipping"),
    "learning_rate": Metric("gauge", "learning rate of the step"),
    "group_learning_rate": Metric("gauge", "learning rate of a tower or group of its own", ("group",)),
    "group_gradient_norm": Metric("gauge", "norm of the gradient of a group of modules", ("group",)),
    "group_update_ratio": Metric("gauge", "length of the update over that of the weights", ("group",)),
    "loss_scale": Metric("gauge", "what fp16 losses are multiplied by"),
    "skipped_steps": Metric("counter", "updates that were not applied", ("reason",)),
    "bad_samples": Metric("counter", "samples that could not be used"),
    "recompiles": Metric("counter", "compilations after the first steps"),
}

TROUBLE = {
    "restarts": Metric("counter", "incidents after which ranks were started again", ("cause",)),
    "incidents": Metric("counter", "things that went wrong", ("kind", "severity")),
    "checkpoints": Metric("counter", "checkpoints that are complete"),
    "checkpoint_stall_seconds": Metric("counter", "time that training stood still for checkpoints"),
    "checkpoint_last_success_timestamp_seconds": Metric("gauge", "when the newest checkpoint was complete"),
    "checkpoint_interval_seconds": Metric("gauge", "the longest of the last five times between checkpoints"),
    "checkpoint_duration_seconds": Metric("gauge", "how long the newest checkpoint took to be written"),
    "checkpoint_bytes": Metric("gauge", "size of the newest checkpoint"),
    "dropped_series": Metric("counter", "series that were left out because a metric had too many"),
}

RESOURCES = {
    "memory_bytes": Metric("gauge", "memory of rank 0's device", ("kind",)),
    "memory_fragmentation_ratio": Metric("gauge", "reserved memory that is free but split"),
    "allocator_retries": Metric("counter", "times the allocator had to give memory back and try again"),
    "ooms": Metric("counter", "times memory ran out on rank 0's device"),
    "collective_wait_seconds": Metric("summary", "time in collectives that nothing hid, a step", ("group",)),
    "data_wait_seconds": Metric("summary", "time that a step waited for its batch"),
    "straggler_wait_seconds": Metric("summary", "time that a step waited for the slowest rank"),
    "straggler_score_ratio": Metric("gauge", "own work of the median rank over that of the slowest; 1 is even"),
    "rank_busy_seconds": Metric("gauge", "own work of a rank in a step", ("stat",)),
    "rank_data_seconds": Metric("gauge", "time a rank waited for its batch", ("stat",)),
    "rank_wait_seconds": Metric("gauge", "time a rank waited for others", ("stat",)),
    "rank_peak_bytes": Metric("gauge", "most memory a rank had in use", ("stat",)),
    "rank_outlier_ratio": Metric("gauge", "an outlier rank over the median rank", ("rank", "what")),
    "rank_cpu_cores": Metric("gauge", "cores that a rank keeps busy", RANK),
    "rank_loader_cpu_cores": Metric("gauge", "cores that a rank's loaders keep busy", RANK),
    "rank_memory_bytes": Metric("gauge", "host memory of a rank", RANK),
    "node_cpu_ratio": Metric("gauge", "share of all cores that is busy", ("node", "stat")),
    "node_memory_bytes": Metric("gauge", "host memory", ("node", "kind", "stat")),
    "node_disk_bytes_per_second": Metric("gauge", "traffic of the disks", ("node", "direction", "stat")),
    "node_network_bytes_per_second": Metric("gauge", "traffic of the network", ("node", "direction", "stat")),
    "disk_free_bytes": Metric("gauge", "free on the disk of the run", ("node", "stat")),
    "gpu_utilisation_ratio": Metric("gauge", "share of time in which a kernel ran", GPU),
    "gpu_memory_bytes": Metric("gauge", "memory of the GPU, by all processes", (*GPU, "kind")),
    "gpu_power_watts": Metric("gauge", "power drawn", GPU),
    "gpu_power_limit_watts": Metric("gauge", "power that may be drawn", GPU),
    "gpu_temperature_celsius": Metric("gauge", "temperature", GPU),
    "gpu_sm_clock_hertz": Metric("gauge", "clock of the multiprocessors", GPU),
    "gpu_sm_clock_max_hertz": Metric("gauge", "clock that they could have", GPU),
    "gpu_ecc_uncorrected": Metric("gauge", "memory errors that ECC could not correct, so far", GPU),
    "gpu_throttled": Metric("gauge", "GPUs whose clock is held down, by reason", ("reason",)),
}

CATALOGUE = PROGRESS | LEARNING | TROUBLE | RESOURCES
