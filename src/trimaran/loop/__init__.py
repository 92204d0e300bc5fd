"""The API for one's own training loop: `trimaran.prepare`."""
