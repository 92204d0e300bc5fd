"""The batching engine: many requests share each forward, over a paged key-value cache."""
