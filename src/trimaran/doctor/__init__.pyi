"""Public names of `trimaran.doctor`, and the modules that they come from. They are imported on first use."""

from .checks.known_variables import known_names as known_names
from .checks.between_nodes import (
    culprits as culprits, first_round as first_round, node_pairs as node_pairs, second_round as second_round,
)
from .checks.software import (
    known_bad as known_bad, misspelt as misspelt, within as within, wrong_algorithms as wrong_algorithms,
)
from .diagnose import diagnose as diagnose
from .evidence import Evidence as Evidence, read_evidence as read_evidence, read_planner_inputs as read_planner_inputs
from .fabric_presets import (
    FABRICS as FABRICS, FabricFacts as FabricFacts, load_presets as load_presets, preset_changes as preset_changes,
    read_fabric as read_fabric,
)
from .machine_facts import (
    DiskFacts as DiskFacts, Ecc as Ecc, Facts as Facts, Gpu as Gpu, GpuClocks as GpuClocks, HostFacts as HostFacts,
    Interconnect as Interconnect, MachineMeasurements as MachineMeasurements, Nic as Nic,
    NodeMeasurements as NodeMeasurements, Pair as Pair, ProcessLimits as ProcessLimits,
    RunRequirements as RunRequirements, Versions as Versions,
)
from .measure_machine import RendezvousOptions as RendezvousOptions, measure_devices as measure_devices
from .memory_fix import usable_bytes as usable_bytes
from .nvidia_smi import (
    FULL_QUERY as FULL_QUERY, PEER_MATRIX as PEER_MATRIX, SHORT_QUERY as SHORT_QUERY,
    TOPOLOGY_MATRIX as TOPOLOGY_MATRIX, parse_full_query as parse_full_query,
    parse_gpu_nic_paths as parse_gpu_nic_paths, parse_peers as parse_peers, parse_short_query as parse_short_query,
    run_nvidia_smi as run_nvidia_smi,
)
from .predicted_gain import (
    apply_patch as apply_patch, forecast as forecast, patch_settings as patch_settings,
    predicted_gain as predicted_gain, with_measured_links as with_measured_links,
)
from .preflight import CHECKS as CHECKS, refuse_failed_checks as refuse_failed_checks, run_checks as run_checks
from .probe_process import ProbeProcess as ProbeProcess
from .read_machine import (
    is_port_in_use as is_port_in_use, read_disk as read_disk, read_facts as read_facts,
    read_interconnect as read_interconnect, read_nics as read_nics, visible as visible,
)
from .rules import RULES as RULES
from .rules.communication import MAX_BUSY_CORES_FRACTION as MAX_BUSY_CORES_FRACTION
from .rules.compute import debug_on as debug_on
from .rules.hardware import swap as swap
from .rules.memory import memory_growth as memory_growth
from .step_breakdown import (
    StepBreakdown as StepBreakdown, steady_steps as steady_steps, step_breakdown as step_breakdown,
)
from .targets import TargetCheck as TargetCheck, check_targets as check_targets
