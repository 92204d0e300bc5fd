"""One file for each diagnosis."""
