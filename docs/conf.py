"""Configuration of Sphinx, which builds the site from the Markdown pages. See docs/adr/0007-docs-site.md."""

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from docs.generator.site import TREES, recipe_schema, write_pages

from orthomerge.core.version import VERSION

project = "orthomerge"
author = "The orthomerge authors"
release = VERSION
extensions = ["myst_parser"]
# The source folder is the root of the repository, so that links between pages are the same as on GitHub.
root_doc = "docs/index"
include_patterns = ["docs/**.md", "benchmarks/results/*.md", "CHANGELOG.md", "CONTRIBUTING.md", "README.md"]
exclude_patterns = [".*", "build", "dist", "site", "src", "tests"]
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


def setup(app: Any) -> None:
    app.connect("builder-inited", lambda app: write_pages())
    app.connect("source-read", append_tree)
    app.connect("build-finished", add_files)


def append_tree(app: Any, name: str, text: list[str]) -> None:
    text[0] += TREES.get(name, "")
    if name == "README":  # its links are checked, but the index is the first page
        text[0] = f"---\norphan: true\n---\n{text[0]}"


def add_files(app: Any, error: Exception | None) -> None:
    """Write the JSON Schema of recipes, and a first page that leads to the index."""
    Path(app.outdir, "recipe.schema.json").write_bytes(recipe_schema())
    Path(app.outdir, "index.html").write_text('<meta http-equiv="refresh" content="0; url=docs/index.html">\n')
