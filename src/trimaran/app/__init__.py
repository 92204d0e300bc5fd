"""The command line and its output. Only this package prints, and no other package imports it."""
