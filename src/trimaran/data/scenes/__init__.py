"""Scenes of several sensors: recorded (nuScenes) or simulated."""
