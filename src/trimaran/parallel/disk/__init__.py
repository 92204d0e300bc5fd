"""Weights and optimizer states on local disks."""
