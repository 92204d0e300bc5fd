"""Plans that were measured: tuning, rehearsals, earlier runs, and rates fitted to them."""
