"""Optimizers: AdamW in several precisions, streamed states, schedules and loss scales."""
