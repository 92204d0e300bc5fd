"""Training on one rank: the worker, the training loop, and their parts."""
