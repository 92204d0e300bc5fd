"""Commands of this package: serve, generate, eval, export and `plan --serve`."""
