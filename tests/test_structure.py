"""The house: imports go down only, rooms have a size, and packages only hand names on."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FLOORS = (
    {
        "errors",
        "ending",
        "identity",
        "launcher",
        "progress",
        "duration",
        "settings",
        "journal",
        "mounts",
        "rundir",
        "speaking",
        "stepmark",
        "verbs",
    },
    {"volume"},
    {"distributed"},
    {"data"},
    {"checkpoint"},
    {"goodput"},
    {"schedules", "recipe", "callback"},
    {"loop"},
    {"trainer"},
    {"callbacks"},
    {"config"},
    {"sweep", "train"},
)
MAX_FILE, MAX_FUNCTION = 400, 60
MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for path in sorted((ROOT / "framework").rglob("*.py"))
}
FILES = sorted(str(path.relative_to(ROOT)) for top in ("framework", "recipes") for path in (ROOT / top).rglob("*.py"))


def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), filename=str(path))


def is_for_types(node: ast.AST) -> bool:
    """`if TYPE_CHECKING:`, whose imports do not happen."""
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)


def statements(node: ast.AST) -> Iterator[ast.AST]:
    """Everything that can run, in functions too."""
    for child in ast.iter_child_nodes(node):
        if not is_for_types(child):
            yield child
            yield from statements(child)


def imported(name: str) -> set[str]:
    """Modules of the framework that a module imports, at its top or inside a function."""
    found = set()
    for node in statements(tree(MODULES[name])):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name}: relative import"
            module = node.module or ""
            found |= {f"{module}.{a.name}" if f"{module}.{a.name}" in MODULES else module for a in node.names}
    return {one for one in found if one in MODULES and one != "framework"} - {name}


IMPORTS = {name: imported(name) for name in MODULES if name != "framework"}


def floor(name: str) -> int:
    part = name.split(".")[1]
    return next(number for number, floor in enumerate(FLOORS) if part in floor)


def test_every_module_has_a_floor() -> None:
    for name in IMPORTS:
        assert any(name.split(".")[1] in floor for floor in FLOORS), f"{name} is on no floor: add it to FLOORS"
    assert len(IMPORTS) > 60


def test_imports_go_down_only() -> None:
    up = [f"{name} -> {one}" for name, found in IMPORTS.items() for one in found if floor(one) > floor(name)]
    assert up == []


def test_imports_are_seen_where_they_are_known_to_be() -> None:
    """The reading of imports that the test above relies on."""
    assert "framework.loop.assembly" in IMPORTS["framework.trainer"]
    assert "framework.distributed" in IMPORTS["framework.trainer"]  # from framework import distributed
    assert "framework.trainer" in IMPORTS["framework.train"]  # inside a function
    assert "framework.trainer" not in IMPORTS["framework.callback"]  # for types only


def test_there_are_no_circles() -> None:
    done: set[str] = set()

    def visit(name: str, path: tuple[str, ...]) -> None:
        assert name not in path, " -> ".join([*path[path.index(name) :], name])
        if name not in done:
            for one in sorted(IMPORTS[name]):
                visit(one, (*path, name))
            done.add(name)

    for name in IMPORTS:
        visit(name, ())


@pytest.mark.parametrize("file", FILES)
def test_rooms_have_a_size_and_say_what_they_promise(file: str) -> None:
    source = (ROOT / file).read_text()
    module = ast.parse(source)
    assert len(source.splitlines()) <= MAX_FILE
    assert ast.get_docstring(module), f"{file} has no module docstring"
    functions = [node for node in ast.walk(module) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    long = {one.name: one.end_lineno - one.lineno + 1 for one in functions if one.end_lineno is not None}
    assert {name: length for name, length in long.items() if length > MAX_FUNCTION} == {}


@pytest.mark.parametrize("name", [name for name, path in MODULES.items() if path.name == "__init__.py"])
def test_a_package_only_hands_names_on(name: str) -> None:
    for node in tree(MODULES[name]).body:
        match node:
            case ast.Import() | ast.ImportFrom() | ast.Expr(value=ast.Constant()):
                continue
            case ast.Assign(targets=[ast.Name(id="__all__" | "_HOMES")]) | ast.AnnAssign(target=ast.Name(id="_HOMES")):
                continue
            case ast.FunctionDef(name="__getattr__" | "__dir__"):
                continue
            case ast.If() if is_for_types(node):
                continue
        raise AssertionError(f"{MODULES[name]}:{node.lineno}: {ast.unparse(node)[:80]}")


HEAVY = """
import runpy, sys
sys.argv = ["x", "--help"]
try:
    runpy.run_module({module!r}, run_name="__main__", alter_sys=True)
except SystemExit as end:
    assert not end.code, end.code
print("loaded:", *({{"torch", "numpy", "mlflow", "matplotlib", "hydra", "torchmetrics"}} & set(sys.modules)))
"""


@pytest.mark.cold
@pytest.mark.parametrize("module", ["framework.checkpoint", "framework.data", "framework.goodput", "framework.train"])
def test_help_loads_nothing_heavy(module: str) -> None:
    command = [sys.executable, "-c", HEAVY.format(module=module)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr
    assert "usage" in done.stdout and done.stdout.splitlines()[-1].split() == ["loaded:"]


def test_names_of_the_package_are_loaded_when_first_used() -> None:
    code = "import sys, framework; assert 'torch' not in sys.modules; framework.Trainer; assert 'torch' in sys.modules"
    subprocess.run([sys.executable, "-c", code], timeout=60, cwd=ROOT, check=True)
