"""Public names of `trimaran.cost`, and the modules that they come from. They are imported on first use."""

from .activation_memory import (
    LayerBytes as LayerBytes, layer_bytes as layer_bytes, saved_layer_bytes as saved_layer_bytes, saved_on_rank as
    saved_on_rank,
)
from .block_time import (
    BlockKind as BlockKind, BlockSplit as BlockSplit, EAGER as EAGER, context_copy_seconds as context_copy_seconds,
    elementwise_bytes as elementwise_bytes, layer_passes as layer_passes, opaque_passes as opaque_passes,
    repeated_flops as repeated_flops,
)
from .collective import (
    GatheredUnit as GatheredUnit, NETWORK_EFFICIENCY as NETWORK_EFFICIENCY, NETWORK_GATHER_EFFICIENCY as
    NETWORK_GATHER_EFFICIENCY, NETWORK_HOP_FACTOR as NETWORK_HOP_FACTOR, REDUCE_HOP_FACTOR as REDUCE_HOP_FACTOR,
    RING_EFFICIENCY as RING_EFFICIENCY, Ring as Ring, all_gather_seconds as all_gather_seconds, all_reduce_seconds
    as all_reduce_seconds, all_to_all_seconds as all_to_all_seconds, exposed_gathers as exposed_gathers,
    exposed_reduction as exposed_reduction, ring_of as ring_of, send_seconds as send_seconds, slow_start_seconds as
    slow_start_seconds,
)
from .goodput import (
    Bill as Bill, Faults as Faults, Goodput as Goodput, best_interval as best_interval, bill_of as bill_of,
    checkpoint_bytes as checkpoint_bytes, expected_goodput as expected_goodput, write_seconds as write_seconds,
)
from .gradient_traffic import LATE_BUCKET_BYTES as LATE_BUCKET_BYTES
from .job import (
    ELEMENT_BYTES as ELEMENT_BYTES, Job as Job, MemoryInputs as MemoryInputs, STATE_BYTES as STATE_BYTES,
    captures_steps as captures_steps, chunk_rows as chunk_rows, memory_inputs_of as memory_inputs_of,
)
from .offload_time import UPDATE_BYTES as UPDATE_BYTES
from .peak_memory import (
    CONTEXT_BYTES as CONTEXT_BYTES, GRAPH_BYTES as GRAPH_BYTES, Memory as Memory, PROCESS_BYTES as PROCESS_BYTES,
    head_memory as head_memory, peak_memory_of as peak_memory_of, rank_memory_of as rank_memory_of, stage_memory_of
    as stage_memory_of,
)
from .rank_part import distinct_parts as distinct_parts, nanotron_stages as nanotron_stages, parts_of as parts_of
from .roofline import (
    CPU_LENGTH as CPU_LENGTH, GENERATIONS as GENERATIONS, KERNEL_GAP_SECONDS as KERNEL_GAP_SECONDS, MULTIPROCESSORS
    as MULTIPROCESSORS, NON_LAYER_PRECISION as NON_LAYER_PRECISION, SUSTAINED_FRACTION as SUSTAINED_FRACTION,
    TILE_DEPTH as TILE_DEPTH, attention_seconds as attention_seconds, host_wait as host_wait, matmul_seconds as
    matmul_seconds, positions_to_hide_launches as positions_to_hide_launches, rate_name as rate_name, rates_of as
    rates_of,
)
from .simulate.job_history import (
    ACTIVITIES as ACTIVITIES, FailureClass as FailureClass, Interruption as Interruption, JobHistory as JobHistory,
    JobTerms as JobTerms, LLAMA_DEVICES as LLAMA_DEVICES, LLAMA_FAILURES as LLAMA_FAILURES, SaveTerms as SaveTerms,
    SlowNodeTerms as SlowNodeTerms, StepTimes as StepTimes, draw_interruptions as draw_interruptions,
    draw_slow_periods as draw_slow_periods, simulate_job as simulate_job,
)
from .simulate.pipeline_order import Order as Order, Schedule as Schedule, pipeline_order as pipeline_order
from .simulate.simulation import (
    NODE_DISK_BANDWIDTH as NODE_DISK_BANDWIDTH, Scenario as Scenario, Simulation as Simulation, Worth as Worth,
    job_terms_of as job_terms_of, job_trace as job_trace, simulate as simulate, spares_needed as spares_needed,
    with_worth as with_worth,
)
from .simulate.step_costs import (
    Demands as Demands, FULL_BANDWIDTH as FULL_BANDWIDTH, Fabric as Fabric, SLOWEST_RANK as SLOWEST_RANK, StageCost
    as StageCost, StepCosts as StepCosts, demands_of as demands_of, fair_share as fair_share, stage_compute_of as
    stage_compute_of, step_costs_of as step_costs_of, with_slower_network as with_slower_network,
)
from .simulate.step_sample import (
    NodeSpeeds as NodeSpeeds, node_speeds_of as node_speeds_of, sample_steps as sample_steps,
)
from .simulate.step_simulation import simulate_step as simulate_step
from .stack_profiles import (
    HF_MODELS as HF_MODELS, HostOverhead as HostOverhead, STACKS as STACKS, Stack as Stack, TIME_PROFILES as
    TIME_PROFILES, TRIMARAN_HOST as TRIMARAN_HOST, TRIMARAN_LAUNCHES as TRIMARAN_LAUNCHES, find_stack as find_stack,
    with_16_bit_gradients as with_16_bit_gradients, without_sequence_parallelism as without_sequence_parallelism,
)
from .stage_time import stage_inputs_of as stage_inputs_of, stage_times_of as stage_times_of
from .states import States as States, num_owned as num_owned, num_owned_in as num_owned_in, states_of as states_of
from .step import (
    MAX_PINNED_FRACTION as MAX_PINNED_FRACTION, RELATIVE_ERROR as RELATIVE_ERROR, StageLoad as StageLoad,
    allocator_slowdown as allocator_slowdown, error_of as error_of, predict as predict, predict_equal as
    predict_equal, rows_by_cost as rows_by_cost, stage_loads as stage_loads, with_rows as with_rows,
)
from .step_time import (
    StepTime as StepTime, pipeline_times_of as pipeline_times_of, rank_compute_of as rank_compute_of, step_time_of
    as step_time_of,
)
