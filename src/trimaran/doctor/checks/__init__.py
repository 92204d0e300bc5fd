"""The checks of `trimaran doctor` on a machine, a module for each topic."""
