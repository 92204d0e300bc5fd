"""A run as one HTML page that needs no network: what it did, beside what was expected of it."""
