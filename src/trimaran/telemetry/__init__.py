"""What happened in a run: goodput ledger, machine samples, traces and sinks. Receives numbers, never tensors."""
