"""Changes the plan of a running run, in its own processes."""
