"""One rank of a plan, run alone: its memory and its time without the other ranks."""
