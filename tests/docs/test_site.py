"""The site builds without a warning, and makes no request to the network."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from docs.generator.assemble import assemble
from tests.docs.reading import ROOT

pytest.importorskip("sphinx")
pytest.importorskip("furo")
pytest.importorskip("myst_parser")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    assemble(folder / "source")
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-b", "html", "-c", "docs"]
    done = subprocess.run(
        [*command, str(folder / "source"), str(folder / "site")],
        cwd=ROOT,
        env={**os.environ, "PYTHONWARNINGS": "ignore"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return folder / "site"


def test_pages_are_there(site: Path) -> None:
    for name in ("index.html", "reference/methods/ties-at-mergekit.html", "reference/cli.html", "recipe.schema.json"):
        assert (site / name).is_file(), name
    assert "Search.setIndex" in (site / "searchindex.js").read_text()


def test_nothing_is_fetched_from_elsewhere(site: Path) -> None:
    attributes = re.compile(
        r"<(?:script|img|iframe|source)[^>]*\ssrc=\"([^\"]+)\""
        r"|<link[^>]*rel=\"(?:stylesheet|preload|preconnect|icon)\"[^>]*href=\"([^\"]+)\""
    )
    for page in site.rglob("*.html"):
        addresses = ["".join(match) for match in attributes.findall(page.read_text())]
        assert addresses
        assert [one for one in addresses if re.match(r"(?:https?:)?//", one)] == [], page
    for style in site.rglob("*.css"):
        assert not re.search(r"url\(\s*['\"]?(?:https?:)?//", style.read_text()), style
