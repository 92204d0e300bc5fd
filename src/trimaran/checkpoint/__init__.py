"""State on disk and in memory: complete and verified, or not there."""
