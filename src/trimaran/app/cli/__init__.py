"""The command line: `main.py` lists the verbs, and each verb is a file of its own."""
