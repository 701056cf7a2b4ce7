"""Files on disk as lazy tensors, and output folders that are complete or absent."""
