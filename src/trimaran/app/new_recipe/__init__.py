"""What `trimaran init` finds out about a model and data, what it chooses, and the recipe that it writes."""
