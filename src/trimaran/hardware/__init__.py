"""What the machines are: the catalogue of devices, clusters, and this machine. Imports no torch."""

from trimaran.hardware.catalogue import DEVICES, Device, find_device
from trimaran.hardware.cluster import Cluster
from trimaran.hardware.detect import detect
from trimaran.hardware.parse import parse_cluster

__all__ = ["DEVICES", "Cluster", "Device", "detect", "find_device", "parse_cluster"]
