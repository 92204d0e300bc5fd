"""The rules that diagnose a run, one file each."""
