"""Optional parts of training, each imported only by the plans that use it. `table.py` lists them."""
