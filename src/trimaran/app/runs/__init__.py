"""Commands that read a run: watch, checkpoints, decisions and incidents."""
