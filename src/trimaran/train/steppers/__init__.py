"""How the micro-batches of a step become gradients and an update."""
