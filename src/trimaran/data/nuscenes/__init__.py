"""Scenes in the layout of nuScenes: JSON tables, and the files of its sensors (docs/decisions/0072)."""
