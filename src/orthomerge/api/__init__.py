"""The verbs of the library: names in, values out."""
