"""The checks of `trimaran doctor` on a machine, one file each."""
