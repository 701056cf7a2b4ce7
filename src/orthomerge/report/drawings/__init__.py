"""One drawing for each kind of figure."""
