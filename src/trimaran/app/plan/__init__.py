"""Commands about plans: plan, predict, simulate, rehearse, tune, init and history."""
