"""The supervisor of a run: its nodes and ranks, what failed, and how the run continues."""
