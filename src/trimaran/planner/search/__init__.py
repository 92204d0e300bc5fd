"""The search: the space of plans, bounds, and the order in which plans are tried."""
