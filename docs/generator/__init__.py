"""Generated pages of the site, from tables, types and docstrings."""
