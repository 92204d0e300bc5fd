"""Devices, clusters and the limits of this machine. Imports no torch."""

from trimaran.hardware.calibration import Calibration, apply_calibration, calibration_folder, read_calibration
from trimaran.hardware.cluster import Cluster, Link, refuse_mixed
from trimaran.hardware.cpu_rates import CpuRates
from trimaran.hardware.detect import detect, machine_name, num_cores
from trimaran.hardware.device_catalogue import DEVICES, Device, find_device
from trimaran.hardware.parse_cluster import parse_cluster

__all__ = [
    "DEVICES",
    "Calibration",
    "Cluster",
    "CpuRates",
    "Device",
    "Link",
    "apply_calibration",
    "calibration_folder",
    "detect",
    "find_device",
    "machine_name",
    "num_cores",
    "parse_cluster",
    "read_calibration",
    "refuse_mixed",
]
