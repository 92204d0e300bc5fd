"""Which plans are legal, and which are not, with the reason."""
