"""Resolves the command line to a recipe, model, cluster and plan."""
