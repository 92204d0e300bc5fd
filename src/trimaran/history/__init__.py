"""Plans that were measured: what runs on disk say about speed, an index of them, and rates fitted to them. No torch."""
