"""One module removes files, and only what it can prove to be ours."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from orthomerge.files.replacing import remove_folder, remove_listed

SOURCE = Path(__file__).parents[2] / "src" / "orthomerge"
REMOVING = {"rmtree", "unlink", "rmdir", "remove", "removedirs"}
MODULES = sorted(path for path in SOURCE.rglob("*.py") if path != SOURCE / "files" / "replacing.py")


def removals(tree: ast.AST) -> Iterator[str]:
    """Attributes and imports that remove something on disk; `remove` only of `os`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in REMOVING:
            of = node.value.id if isinstance(node.value, ast.Name) else ""
            if node.attr not in ("remove", "removedirs") or of == "os":
                yield f"{of}.{node.attr}, line {node.lineno}"
        if isinstance(node, ast.ImportFrom) and node.module in ("os", "shutil"):
            yield from (f"{each.name}, line {node.lineno}" for each in node.names if each.name in REMOVING)


def test_nothing_else_removes_files() -> None:
    calls = {path.relative_to(SOURCE).as_posix(): list(removals(ast.parse(path.read_text()))) for path in MODULES}
    assert {name: each for name, each in calls.items() if each} == {}
    assert len(list(removals(ast.parse((SOURCE / "files" / "replacing.py").read_text())))) == 3  # the test sees them


def test_a_folder_without_a_proof_is_not_removed(tmp_path: Path) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "marker").touch()
    folder = tmp_path / "a"
    remove_folder(folder, proof="marker")
    assert (folder / "b").is_dir()
    (folder / "marker").symlink_to(tmp_path / "marker")
    remove_folder(folder, proof="marker")
    assert (folder / "b").is_dir()
    (folder / "marker").unlink()
    (folder / "marker").touch()
    remove_folder(folder, proof="marker")
    assert not folder.exists()
    (tmp_path / "empty").mkdir()
    remove_folder(tmp_path / "empty", proof="marker")
    assert [path.name for path in tmp_path.iterdir()] == ["marker"]


@pytest.mark.parametrize(
    "name", ["../x/precious", "/etc/hostname", "link/precious", "..", ".", "", "a/../../x/precious"]
)
def test_listed_names_that_lead_elsewhere_are_left_alone(tmp_path: Path, name: str) -> None:
    precious = tmp_path / "x" / "precious"
    precious.parent.mkdir()
    precious.write_text("years of work")
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "link").symlink_to(precious.parent)
    remove_listed(folder, [name])
    assert precious.read_text() == "years of work"
    assert (folder / "link").is_symlink()


def test_listed_files_go_and_the_folders_that_are_empty_then(tmp_path: Path) -> None:
    for name in ("a/b/one", "a/two", "c/three"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    remove_listed(tmp_path, ["a/b/one", "c/three", "never"])
    assert sorted(path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*")) == ["a", "a/two"]
