"""What is wrong with a machine before a run, and with a run while it happens or afterwards."""
