"""Which recipe, model, cluster and data a command is about; commands that show them."""
