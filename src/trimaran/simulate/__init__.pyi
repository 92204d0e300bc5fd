"""Public names of `trimaran.simulate`, and the modules that they come from. They are imported on first use."""

from .fabric import (
    Demands as Demands, FULL_BANDWIDTH as FULL_BANDWIDTH, Fabric as Fabric, demands_of as demands_of,
    fair_share as fair_share, with_slower_network as with_slower_network,
)
from .failure_classes import (
    FailureClass as FailureClass, LLAMA_DEVICES as LLAMA_DEVICES, LLAMA_FAILURES as LLAMA_FAILURES,
)
from .job_history import (
    ACTIVITIES as ACTIVITIES, Interruption as Interruption, JobHistory as JobHistory, JobTerms as JobTerms,
    SaveTerms as SaveTerms, SlowNodeTerms as SlowNodeTerms, StepTimes as StepTimes,
    draw_interruptions as draw_interruptions, draw_slow_periods as draw_slow_periods, simulate_job as simulate_job,
)
from .pipeline_order import Order as Order, Schedule as Schedule, pipeline_order as pipeline_order
from .simulation import (
    Scenario as Scenario, Simulation as Simulation, Worth as Worth, job_terms_of as job_terms_of, simulate as simulate,
    spares_needed as spares_needed, with_worth as with_worth,
)
from .step_costs import (
    SLOWEST_RANK as SLOWEST_RANK, StageCost as StageCost, StepCosts as StepCosts, stage_compute_of as stage_compute_of,
    step_costs_of as step_costs_of,
)
from .step_sample import NodeSpeeds as NodeSpeeds, node_speeds_of as node_speeds_of, sample_steps as sample_steps
from .step_simulation import simulate_step as simulate_step
from .trace_file import job_trace as job_trace
