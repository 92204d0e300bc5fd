"""One run started and followed from this terminal."""
