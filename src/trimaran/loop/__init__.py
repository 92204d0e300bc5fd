"""The API for a user's own training loop: `trimaran.prepare`."""
