"""The version, in one place; readable without installing the package."""

VERSION = "0.1.0"
