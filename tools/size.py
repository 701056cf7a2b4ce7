"""Count what needs no run: lines, statements, docstrings, cycles of imports, names used twice. For `walk.py --static`.

Lines, statements and docstrings leave out `orthomerge.testing`. Imports inside functions count for cycles, those for
types do not.
"""

from __future__ import annotations

import ast
import collections
from collections.abc import Iterator
from pathlib import Path

import networkx as nx

# Upper bounds; None is printed and not checked.
TARGETS: dict[str, int | None] = {
    "lines": 27_000,
    "statements": 13_500,
    "files": 240,
    "root files": 2,
    "modules in cycles": 0,
    "packages in cycles": 0,
    "recipe copies": 0,
    "docstrings, % of lines": None,
    "lazy pairs": None,
    "module names twice": None,
    "class names twice": None,
    "functions > 10 parameters": None,
    "functions with **kwargs": None,
    "import_module calls": None,
}
# Fields of a recipe that nobody may change in a copy of one, but the reader.
_FIELDS = {"align", "base", "dtype", "evaluate", "experts", "fit", "heads", "method", "out", "parameters", "pooling"}
_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def static_numbers(package: Path) -> dict[str, int]:
    """The numbers of TARGETS for the package in a folder."""
    names = {path: ".".join(path.relative_to(package.parent).with_suffix("").parts) for path in package.rglob("*.py")}
    trees = {name.removesuffix(".__init__"): ast.parse(path.read_text()) for path, name in names.items()}
    files = {name for name in names.values() if not name.endswith("__")}
    counts = collections.Counter(dict.fromkeys(TARGETS, 0))
    counts["files"], counts["root files"] = len(trees), len(list(package.glob("*.py")))
    counts["lines"] = sum(len(path.read_text().splitlines()) for path in names if path.parent.name != "testing")
    docstrings = 0
    modules, classes = collections.defaultdict(set), collections.defaultdict(set)
    imports: dict[tuple[str, str], set[str]] = collections.defaultdict(set)
    for name, tree in trees.items():
        package_name = _package(name)
        if name in files and package_name not in ("api", "cli"):
            modules[name.rpartition(".")[2]].add(name)
        if package_name != "testing":
            docstrings += sum(_docstring_lines(node) for node in ast.walk(tree))
            counts["statements"] += sum(_is_statement(node) for node in ast.walk(tree))
            counts["statements"] -= sum(_docstring_lines(node) > 0 for node in ast.walk(tree))
        for imported, kind in _imports(tree, set(trees)):
            if imported != name:
                imports[name, imported].add(kind)
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef):
                arguments = node.args
                many = len(arguments.posonlyargs) + len(arguments.args) + len(arguments.kwonlyargs) > 10
                counts["functions > 10 parameters"] += many
                counts["functions with **kwargs"] += arguments.kwarg is not None
            elif isinstance(node, ast.ClassDef) and node in tree.body:
                classes[node.name].add(name)
            elif isinstance(node, ast.Call):
                counts["import_module calls"] += "import_module" in ast.unparse(node.func)
                counts["recipe copies"] += _copies_recipe(node) and not name.endswith(".recipe")
    edges = {(_package(one), _package(other)) for one, other in imports if _package(one) != _package(other)}
    counts["modules in cycles"], counts["packages in cycles"] = _in_cycles(set(imports)), _in_cycles(edges)
    counts["lazy pairs"] = sum(kinds == {"lazy"} for kinds in imports.values())
    counts["module names twice"] = sum(len(places) > 1 for places in modules.values())
    counts["class names twice"] = sum(len(places) > 1 for places in classes.values())
    counts["docstrings, % of lines"] = round(100 * docstrings / counts["lines"])
    return dict(counts)


def _package(module: str) -> str:
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else ""


def _is_statement(node: ast.AST) -> bool:
    return isinstance(node, ast.stmt) and not isinstance(node, (ast.Import, ast.ImportFrom))


def _docstring_lines(node: ast.AST) -> int:
    if not isinstance(node, _DOCUMENTED) or ast.get_docstring(node, clean=False) is None:
        return 0
    return (node.body[0].end_lineno or 0) - node.body[0].lineno + 1


def _imports(tree: ast.Module, modules: set[str]) -> Iterator[tuple[str, str]]:
    """Modules of ours that a module imports, each with `lazy` if inside a function, else `top`."""
    blocks = [node for node in ast.walk(tree) if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"]
    for_types = {id(inner) for block in blocks for inner in ast.walk(block)}
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    lazy = {id(inner) for function in functions for inner in ast.walk(function)}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and id(node) not in for_types:
            for name in (f"{node.module}.{alias.name}" for alias in node.names):
                imported = name if name in modules else node.module
                if imported in modules:
                    yield imported, "lazy" if id(node) in lazy else "top"


def _copies_recipe(call: ast.Call) -> bool:
    """Whether a call makes a recipe by hand, or replaces fields of one that only its reader may set."""
    if not isinstance(call.func, ast.Name):
        return False
    changed = {word.arg for word in call.keywords}
    copied = call.func.id == "replace" and bool(call.args) and "recipe" in ast.unparse(call.args[0]).lower()
    return call.func.id == "Recipe" or (copied and (None in changed or bool(changed & _FIELDS)))


def _in_cycles(edges: set[tuple[str, str]]) -> int:
    groups = nx.strongly_connected_components(nx.DiGraph(list(edges)))
    return sum(len(group) for group in groups if len(group) > 1)
