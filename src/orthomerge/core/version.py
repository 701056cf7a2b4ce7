"""Version, readable without installing the package."""

VERSION = "0.2.0"
