"""The verbs of the library, one file per verb: names in, values out."""
