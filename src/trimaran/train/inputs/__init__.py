"""The training data of a run, and cached vision features."""
