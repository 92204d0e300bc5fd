"""Our own decoder: attention, experts, and the split of its layers."""
