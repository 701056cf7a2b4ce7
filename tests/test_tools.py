"""The lock says what the constraints say, the bill of materials what pip reports, and the walk counts cycles."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tools.lock import CONSTRAINTS, LOCK, differences
from tools.sbom import bill
from tools.walk import stale_names, static_numbers

HASH = "--hash=sha256:" + "0" * 64


def test_the_lock_is_that_of_the_constraints() -> None:
    assert differences(CONSTRAINTS.read_text(), LOCK.read_text()) == [], "run `make lock`"


def test_what_makes_them_differ() -> None:
    constraints = "# a note\nOne_Name==1.0\ntwo==2.0\nthree==3.0\n"
    lock = f"# made\none-name==1.0 \\\n    {HASH}\ntwo==2.1 \\\n    {HASH}\nfour==4.0\n"
    assert differences(constraints, lock) == [
        "four 4.0 is in no constraint",
        "four has no hash",
        "three 3.0 is not in the lock",
        "two is 2.0 but locked 2.1",
    ]


def test_the_bill_of_materials() -> None:
    items: list[dict[str, Any]] = [
        {
            "metadata": {"name": "Torch", "version": "2.13.0+cpu", "license_expression": "BSD-3-Clause"},
            "download_info": {"archive_info": {"hashes": {"sha256": "ab"}}},
        },
        {"metadata": {"name": "a_b", "version": "1", "license": "MIT\nlong text"}, "download_info": {}},
    ]
    found = bill(items)
    assert (found["bomFormat"], found["specVersion"]) == ("CycloneDX", "1.6")
    assert [part["purl"] for part in found["components"]] == ["pkg:pypi/a-b@1", "pkg:pypi/torch@2.13.0"]
    assert found["components"][0]["licenses"] == [{"license": {"name": "MIT"}}]
    assert found["components"][1]["hashes"] == [{"alg": "SHA-256", "content": "ab"}]
    assert found["dependencies"][0]["dependsOn"] == ["pkg:pypi/a-b@1", "pkg:pypi/torch@2.13.0"]


def test_the_walk_counts_functions_that_exist() -> None:
    assert stale_names(Path(__file__).parents[1] / "src" / "orthomerge") == []


def test_the_walk_counts_imports_inside_functions_but_not_those_for_types(tmp_path: Path) -> None:
    package = tmp_path / "package"
    package.mkdir()
    (package / "one.py").write_text("from package.two import b\n\ndef a():\n    return 1\n")
    (package / "two.py").write_text("def b():\n    from package.one import a\n    return a\n")
    (package / "three.py").write_text(
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from package.four import d\n"
    )
    (package / "four.py").write_text("from package.three import c\n")
    numbers = static_numbers(package)
    assert numbers["modules in cycles"] == 2
    assert (numbers["files"], numbers["lines"], numbers["lazy pairs"]) == (4, 11, 1)
