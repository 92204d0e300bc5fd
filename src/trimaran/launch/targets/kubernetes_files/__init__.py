"""Kubernetes manifests: what they contain, what is wrong with those of others, and the client that submits them."""
