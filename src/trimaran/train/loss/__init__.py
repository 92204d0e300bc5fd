"""Objectives and losses, summed over tokens."""
