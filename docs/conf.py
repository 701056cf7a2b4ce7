"""How Sphinx builds the site from what `python -m docs.generator` has assembled. See docs/adr/0007-docs-site.md."""

from pathlib import Path
from typing import Any

from docs.generator.assemble import recipe_schema

from orthomerge.core.version import VERSION

project = "orthomerge"
author = "The orthomerge authors"
release = VERSION
extensions = ["myst_parser"]
html_theme = "furo"
html_title = "orthomerge"
html_show_copyright = False
html_static_path = ["static"]
html_css_files = ["orthomerge.css"]
html_theme_options = {"navigation_with_keys": True}
html_copy_source = False
html_show_sphinx = False
# Headings are link targets under the names that GitHub gives them.
myst_heading_anchors = 4
# Quotes and dashes stay as they were typed.
smartquotes = False
highlight_language = "text"
exclude_patterns = ["_build"]


def setup(app: Any) -> None:
    """Write the JSON Schema of recipes beside the pages."""
    app.connect("build-finished", lambda app, _: (Path(app.outdir) / "recipe.schema.json").write_bytes(recipe_schema()))
