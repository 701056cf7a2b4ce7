"""Functions of the library, one file per function."""
