"""Public names of `trimaran.machine`, and the modules that they come from. They are imported on first use."""

from .calibration import (
    Calibration as Calibration, Collectives as Collectives, FittedRates as FittedRates, LinkFactors as LinkFactors,
    MAX_FACTOR as MAX_FACTOR, MIN_FACTOR as MIN_FACTOR, apply_calibration as apply_calibration, calibration_folder
    as calibration_folder, combined as combined, first_error as first_error, read_calibration as read_calibration,
    with_fitted as with_fitted,
)
from .checks.between_nodes import (
    culprits as culprits, first_round as first_round, node_pairs as node_pairs, second_round as second_round,
    suspects as suspects,
)
from .checks.fabric_presets import (
    FABRICS as FABRICS, FabricFacts as FabricFacts, load_presets as load_presets, preset_changes as preset_changes,
    read_fabric as read_fabric,
)
from .checks.machine_facts import (
    DiskFacts as DiskFacts, Facts as Facts, HostFacts as HostFacts, Interconnect as Interconnect,
    MachineMeasurements as MachineMeasurements, NodeMeasurements as NodeMeasurements, Pair as Pair, ProcessLimits as
    ProcessLimits, RunRequirements as RunRequirements, Versions as Versions,
)
from .checks.measure_machine import (
    ProbeProcess as ProbeProcess, RendezvousOptions as RendezvousOptions, measure_devices as measure_devices,
)
from .checks.preflight import (
    CHECKS as CHECKS, THIS_MACHINE as THIS_MACHINE, check_before_run as check_before_run, refuse_failed_checks as
    refuse_failed_checks, run_checks as run_checks,
)
from .checks.read_machine import (
    is_port_in_use as is_port_in_use, read_disk as read_disk, read_facts as read_facts, read_interconnect as
    read_interconnect, visible as visible,
)
from .checks.software import (
    known_bad as known_bad, known_names as known_names, misspelt as misspelt, within as within, wrong_algorithms as
    wrong_algorithms,
)
from .cluster import (
    Cluster as Cluster, DeviceGroup as DeviceGroup, DiskRates as DiskRates, Link as Link, refuse_mixed as
    refuse_mixed,
)
from .comm_result import (
    BUS_FACTORS as BUS_FACTORS, CommCurve as CommCurve, CommPair as CommPair, CommPoint as CommPoint, CommResult as
    CommResult, LinkFit as LinkFit, fit_link as fit_link, make_points as make_points, read_comm_result as
    read_comm_result,
)
from .cpu_rates import (
    CpuRates as CpuRates, cpu_rates_path as cpu_rates_path, read_cpu_rates as read_cpu_rates, write_cpu_rates as
    write_cpu_rates,
)
from .detect import (
    cpu_flops as cpu_flops, cpu_rates_file as cpu_rates_file, detect as detect, gpu_device as gpu_device,
    machine_name as machine_name, num_cores as num_cores, with_cpu_rates as with_cpu_rates,
)
from .device_catalogue import (
    CPU as CPU, DEVICES as DEVICES, Device as Device, HOST_LAUNCH_SECONDS as HOST_LAUNCH_SECONDS, find_device as
    find_device,
)
from .gpus import (
    Ecc as Ecc, FULL_QUERY as FULL_QUERY, Gpu as Gpu, GpuClocks as GpuClocks, GpuSampler as GpuSampler,
    HARDWARE_THROTTLE_REASONS as HARDWARE_THROTTLE_REASONS, Nic as Nic, PEER_MATRIX as PEER_MATRIX, SHORT_QUERY as
    SHORT_QUERY, THROTTLE_REASONS as THROTTLE_REASONS, TOPOLOGY_MATRIX as TOPOLOGY_MATRIX, gpu_links as gpu_links,
    parse_full_query as parse_full_query, parse_gpu_nic_paths as parse_gpu_nic_paths, parse_peers as parse_peers,
    parse_short_query as parse_short_query, parse_topology as parse_topology, read_network as read_network,
    read_nics as read_nics, run_driver_tool as run_driver_tool,
)
from .host_limits import (
    CGROUP as CGROUP, cores_near as cores_near, count_oom_kills as count_oom_kills, cpu_quota as cpu_quota,
    free_bytes as free_bytes, free_tasks as free_tasks, numa_nodes as numa_nodes, openmp_threads as openmp_threads,
    pci_device as pci_device, total_and_used_bytes as total_and_used_bytes, total_bytes as total_bytes,
)
from .parse_cluster import cluster_of as cluster_of, parse_cluster as parse_cluster, part_of as part_of
from .probe.calibrate import measure_disk as measure_disk
from .probe.collective_calls import CommGroup as CommGroup, count_wrong as count_wrong, run_forked as run_forked
from .probe.measure_comm import measure as measure
from .probe.measure_cpu import stopped as stopped
from .probe.probe_ranks import (
    NodeRendezvous as NodeRendezvous, PAIR_SECONDS as PAIR_SECONDS, count_wrong_values as count_wrong_values,
    measure_all_reduce as measure_all_reduce, measure_matmuls as measure_matmuls,
)
