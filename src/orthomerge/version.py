"""The version, in one place; readable without installing the package."""

__all__ = ["VERSION"]

VERSION = "0.1.0"
