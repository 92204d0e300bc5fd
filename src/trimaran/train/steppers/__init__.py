"""Steppers: forward, backward and update of one step, for a plain model, a pipeline, and DeepSpeed."""
