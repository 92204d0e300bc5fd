"""Public names of `trimaran.hardware`, and the modules that they come from. They are imported on first use."""

from .calibration import (
    Calibration as Calibration, Collectives as Collectives, apply_calibration as apply_calibration,
    calibration_folder as calibration_folder, read_calibration as read_calibration,
)
from .cluster import (
    Cluster as Cluster, DeviceGroup as DeviceGroup, DiskRates as DiskRates, Link as Link, refuse_mixed as refuse_mixed,
)
from .comm_result import (
    BUS_FACTORS as BUS_FACTORS, CommCurve as CommCurve, CommPair as CommPair, CommPoint as CommPoint,
    CommResult as CommResult, read_comm_result as read_comm_result,
)
from .cpu_rates import (
    CpuRates as CpuRates, cpu_rates_path as cpu_rates_path, read_cpu_rates as read_cpu_rates,
    write_cpu_rates as write_cpu_rates,
)
from .detect import (
    cpu_flops as cpu_flops, cpu_rates_file as cpu_rates_file, detect as detect, gpu_device as gpu_device,
    machine_name as machine_name, num_cores as num_cores, with_cpu_rates as with_cpu_rates,
)
from .device_catalogue import CPU as CPU, DEVICES as DEVICES, Device as Device, find_device as find_device
from .fitted_rates import (
    FittedRates as FittedRates, LinkFactors as LinkFactors, combined as combined, with_fitted as with_fitted,
)
from .gpu_topology import gpu_links as gpu_links, parse_topology as parse_topology, read_network as read_network
from .host_limits import (
    cores_near as cores_near, count_oom_kills as count_oom_kills, cpu_quota as cpu_quota, free_bytes as free_bytes,
    free_tasks as free_tasks, numa_nodes as numa_nodes, openmp_threads as openmp_threads, pci_device as pci_device,
    total_and_used_bytes as total_and_used_bytes, total_bytes as total_bytes,
)
from .link_fit import fit_link as fit_link
from .parse_cluster import parse_cluster as parse_cluster
