"""One plug-in of each kind that Trimaran has. docs/guides/plugins.md explains them."""
