"""From what was typed to a plan: recipe, model, cluster, options."""
