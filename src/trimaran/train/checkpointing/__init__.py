"""When a rank saves its state, where to, and how it restores it."""
