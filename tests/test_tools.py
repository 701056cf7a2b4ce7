"""The lock says what the constraints say, and the bill of materials what pip reports."""

from __future__ import annotations

from typing import Any

from tools.lock import CONSTRAINTS, LOCK, differences
from tools.sbom import bill

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
