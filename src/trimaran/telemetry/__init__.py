"""The goodput ledger, machine samples, profiler traces and sinks. It handles numbers, never tensors."""
