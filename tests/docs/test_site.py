"""The site builds without a warning, and asks nothing of the network."""

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
    for page in site.rglob("*.html"):
        text = page.read_text()
        fetched = re.findall(r"<(?:script|img|iframe|source)[^>]*\ssrc=\"([^\"]+)\"", text)
        fetched += re.findall(r"<link[^>]*rel=\"(?:stylesheet|preload|preconnect|icon)\"[^>]*href=\"([^\"]+)\"", text)
        assert fetched
        assert [one for one in fetched if re.match(r"(?:https?:)?//", one)] == [], page
    for style in site.rglob("*.css"):
        assert not re.search(r"url\(\s*['\"]?(?:https?:)?//", style.read_text()), style


def test_links_between_pages_lead_somewhere(site: Path) -> None:
    for page in site.rglob("*.html"):
        for link in re.findall(r"<a[^>]*\shref=\"([^\"]+)\"", page.read_text()):
            path, _, anchor = link.partition("#")
            if re.match(r"[a-z]+:", link):
                continue
            target = page if not path else (page.parent / path).resolve()
            assert target.is_file(), f"{page.relative_to(site)}: {link}"
            if anchor and target.suffix == ".html" and page.name != "search.html":
                assert f'id="{anchor}"' in target.read_text(), f"{page.relative_to(site)}: {link}"
