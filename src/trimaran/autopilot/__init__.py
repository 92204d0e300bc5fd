"""Changes one thing of a running run at a time, measures it, and keeps it or rolls it back. Imports no torch."""
