"""Elastic replicas: each is a world of its own, and only the exchange of weights joins it to the others."""
