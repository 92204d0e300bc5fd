"""Reads the configuration files of other tools as a plan."""
