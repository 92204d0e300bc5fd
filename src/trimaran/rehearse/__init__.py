"""Single ranks of a plan run for real on one device, without the others, and measured."""
