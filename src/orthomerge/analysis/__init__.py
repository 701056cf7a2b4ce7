"""The geometry of the misalignment, and a verdict in words."""
