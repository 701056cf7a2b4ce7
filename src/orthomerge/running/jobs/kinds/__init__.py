"""One file a kind of job; `table.py` lists them."""
