"""Public names of `trimaran.telemetry`, and the modules that they come from. They are imported on first use."""

from .host_sampler import CounterRates as CounterRates, HostSampler as HostSampler
from .ledger import CATEGORIES as CATEGORIES, Ledger as Ledger, LedgerReader as LedgerReader, read_ledger as read_ledger
from .memory_holders import MemoryOwner as MemoryOwner, downsample as downsample, read_snapshot as read_snapshot
from .merged_trace import (
    clock_shifts as clock_shifts, device_phases as device_phases, merge as merge, write_merged as write_merged,
)
from .nsys_stats import read_nsys_stats as read_nsys_stats
from .nvml import (
    GpuSampler as GpuSampler, HARDWARE_THROTTLE_REASONS as HARDWARE_THROTTLE_REASONS,
    THROTTLE_REASONS as THROTTLE_REASONS,
)
from .rank_table import RankTableWriter as RankTableWriter, read_rank_table as read_rank_table
from .run_tail import RunTail as RunTail
from .sampler import Sampler as Sampler, add_heartbeats as add_heartbeats
from .sidecar import open_feeds as open_feeds
from .sink_feed import SinkFeed as SinkFeed
from .sinks.metric_catalogue import (
    CATALOGUE as CATALOGUE, MAX_INDIVIDUAL_SERIES as MAX_INDIVIDUAL_SERIES,
    MAX_SERIES_PER_METRIC as MAX_SERIES_PER_METRIC,
)
from .sinks.open_sinks import SINKS as SINKS, open_sinks as open_sinks, refuse_missing_sinks as refuse_missing_sinks
from .sinks.prometheus import PrometheusSink as PrometheusSink
from .sinks.sink import Line as Line, Sink as Sink
from .step_index import (
    BLOCK_LINES as BLOCK_LINES, SCALARS as SCALARS, STEP_CATEGORIES as STEP_CATEGORIES, StepBlock as StepBlock,
    StepIndexer as StepIndexer, read_index as read_index, split_step as split_step,
)
from .step_lines import StepLine as StepLine, read_details as read_details, read_step as read_step
from .step_reader import ReadLimits as ReadLimits
from .trace_summary import (
    Trace as Trace, load_trace as load_trace, overlap as overlap, self_times as self_times, summarise as summarise,
    total as total, union as union,
)
