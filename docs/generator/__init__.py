"""What makes the site's source: our Markdown pages as they are, and pages written from tables, types and docstrings."""
