"""The site builds without a warning, so all links lead somewhere; it makes no request to the network."""

from __future__ import annotations

import io
import re
import warnings
from pathlib import Path

import pytest
from tests.docs.reading import ROOT

pytest.importorskip("furo")
pytest.importorskip("myst_parser")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from sphinx.application import Sphinx
    from sphinx.util.docutils import docutils_namespace, patch_docutils

    folder, complaints = tmp_path_factory.mktemp("site"), io.StringIO()
    with warnings.catch_warnings(), patch_docutils(), docutils_namespace():
        warnings.simplefilter("ignore")
        app = Sphinx(ROOT, ROOT / "docs", folder, folder / ".doctrees", "html", status=None, warning=complaints)
        app.build()
    assert complaints.getvalue() == ""
    return folder


def test_pages_are_there(site: Path) -> None:
    pages = (
        "reference/methods/ties-at-mergekit.html",
        "reference/cli.html",
        "gallery/digits.html",
        "adr/0004-blake3.html",
    )
    for name in ("index.html", "recipe.schema.json", *(f"docs/{page}" for page in pages)):
        assert (site / name).is_file(), name
    assert "Search.setIndex" in (site / "searchindex.js").read_text()


def test_nothing_is_fetched_from_elsewhere(site: Path) -> None:
    attributes = re.compile(
        r"<(?:script|img|iframe|source)[^>]*\ssrc=\"([^\"]+)\""
        r"|<link[^>]*rel=\"(?:stylesheet|preload|preconnect|icon)\"[^>]*href=\"([^\"]+)\""
    )
    pages = [page for page in site.rglob("*.html") if page != site / "index.html"]
    for page in pages:
        addresses = ["".join(match) for match in attributes.findall(page.read_text())]
        assert addresses
        assert [one for one in addresses if re.match(r"(?:https?:)?//", one)] == [], page
    for style in site.rglob("*.css"):
        assert not re.search(r"url\(\s*['\"]?(?:https?:)?//", style.read_text()), style
