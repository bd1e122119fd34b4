"""Rules of the tree that no linter knows, read from the files alone.

Each rule is a function of a root folder that yields what is wrong as `file:line: what to do`; it
runs over this checkout, and over small trees that break it on purpose.
"""

import ast
import functools
import importlib.metadata
import os
import re
import sys
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

# Distributions that may be declared without being installed, where the import name is not theirs.
IMPORT_NAMES = {
    "cupy-cuda12x": "cupy",
    "cupy-cuda13x": "cupy",
    "fbgemm-gpu-cpu": "fbgemm_gpu",
}
SKELETON = [
    "README.md",
    "CHANGELOG.md",
    "src/{name}/__init__.py",
    "src/{name}/__main__.py",
    "src/{name}/cli.py",
    "src/{name}/reference.py",
    "src/{name}/py.typed",
    "src/{name}/experiments/__init__.py",
    "tests/test_*.py",
    "benchmarks/bench_*.py",
    "examples/quickstart.py",
]
VAGUE = {"utils", "util", "common", "helpers", "helper", "misc"}
KERNEL_FIELDS = ["grid", "bound by", "accepts", "source"]
MADE_FOLDERS = {"__pycache__", "node_modules", "out", "build", "dist"}
MAX_LINES = 800


@dataclass(frozen=True)
class Member:
    """One distribution of the tree: shared or a system."""

    folder: Path

    @property
    def name(self) -> str:
        """The import name: the one package under src."""
        packages = sorted(p.parent.name for p in self.folder.glob("src/*/__init__.py"))
        return packages[0] if packages else self.folder.name

    def requirements(self) -> dict[str, list[str]]:
        """Requirement texts by extra; "" holds those that always apply."""
        with (self.folder / "pyproject.toml").open("rb") as file:
            project = tomllib.load(file)["project"]
        return {"": project.get("dependencies", []), **project.get("optional-dependencies", {})}


@dataclass(frozen=True)
class Import:
    name: str  # top level
    path: Path
    line: int


def members(root: Path) -> list[Member]:
    projects = [root / "shared/pyproject.toml", *sorted(root.glob("packages/[!.]*/pyproject.toml"))]
    return [Member(p.parent) for p in projects if p.exists()]


def files(folder: Path, *suffixes: str) -> Iterator[Path]:
    """Files below a folder that a person wrote, sorted; with these suffixes, if any are given."""
    for parent, folders, names in os.walk(folder):
        folders[:] = sorted(f for f in folders if f[0] != "." and f not in MADE_FOLDERS)
        for name in sorted(names):
            if not suffixes or name.endswith(suffixes):
                yield Path(parent, name)


def imports(path: Path) -> Iterator[Import]:
    """Absolute imports of a file, also those inside functions and those by a constant name."""
    for node in ast.walk(ast.parse(path.read_text(), filename=str(path))):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names = [node.module or ""]
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            called = ast.unparse(node.func).rpartition(".")[2]
            if called in ("import_module", "find_spec", "importorskip", "__import__"):
                names = [str(node.args[0].value)]
        for name in names:
            if not name.startswith("."):
                yield Import(name.partition(".")[0], path, getattr(node, "lineno", 0))


def distribution(requirement: str) -> str:
    """The normalised name in a requirement: `Torch_Geometric[x]>=2` -> `torch-geometric`."""
    match = re.match(r"\s*([A-Za-z0-9][\w.-]*)", requirement)
    assert match, f"{requirement!r} is no requirement"
    return normal(match[1])


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


@functools.cache
def import_names(distribution_name: str) -> set[str]:
    """What a distribution is imported as; its own name when it is not installed."""
    if distribution_name in IMPORT_NAMES:
        return {IMPORT_NAMES[distribution_name]}
    found = {
        name for name, owners in installed().items() if distribution_name in map(normal, owners)
    }
    return found | {distribution_name.replace("-", "_")}


@functools.cache
def installed() -> dict[str, list[str]]:
    """Import name -> the distributions that bring it."""
    return dict(importlib.metadata.packages_distributions())


def at(root: Path, path: Path, line: int = 1) -> str:
    return f"{path.relative_to(root)}:{line}"


# --- the rules --------------------------------------------------------------------------------


def sibling_imports(root: Path) -> Iterator[str]:
    names = {member.name for member in members(root)} - {"septet_shared"}
    for member in members(root):
        for path in files(member.folder, ".py"):
            for found in imports(path):
                if found.name in names - {member.name}:
                    yield (
                        f"{at(root, path, found.line)}: imports {found.name}, another system; "
                        "copy the few lines, or move the idea to shared if two systems need it"
                    )


def undeclared_imports(root: Path) -> Iterator[str]:
    """Shipped code may import what an extra other than `test` and `peers` brings; tests may all."""
    own_names = {member.name for member in members(root)}
    without_dependencies = {distribution(line) for line in requirement_lines(root)}
    free = set(sys.stdlib_module_names).union(*map(import_names, without_dependencies))
    for member in members(root):
        extras = member.requirements()
        for path in files(member.folder, ".py"):
            in_wheel = (member.folder / "src") in path.parents
            declared = {
                name
                for extra, requirements in extras.items()
                if not (in_wheel and extra == "test")
                for requirement in requirements
                for name in import_names(distribution(requirement))
            }
            told: set[str] = set()
            beside = {other.stem for other in path.parent.glob("*.py")} if not in_wheel else set()
            for found in imports(path):
                name = found.name
                if name in declared | free | beside | told or name == member.name:
                    continue
                if name in own_names - {"septet_shared"}:
                    continue  # sibling_imports says it
                told.add(name)
                where = "dependencies or an extra" if in_wheel else "the extra `test` or `peers`"
                yield (
                    f"{at(root, path, found.line)}: imports {name}, which is not declared; add "
                    f"its distribution to {where} in {at(root, member.folder / 'pyproject.toml')}"
                )


def unused_declarations(root: Path) -> Iterator[str]:
    """What always installs is imported in src; what an extra brings, anywhere in the package."""
    for member in members(root):
        project = member.folder / "pyproject.toml"
        everywhere = {i.name for path in files(member.folder, ".py") for i in imports(path)}
        shipped = {i.name for path in files(member.folder / "src", ".py") for i in imports(path)}
        for extra, requirements in member.requirements().items():
            for requirement in requirements:
                names = import_names(distribution(requirement))
                if member.name in names or names & (everywhere if extra else shipped):
                    continue
                line = line_of(project, requirement)
                yield (
                    f"{at(root, project, line)}: declares {requirement!r}, which nothing "
                    f"{'in the package' if extra else 'in src'} imports; remove it"
                )


def missing_files(root: Path) -> Iterator[str]:
    for member in members(root)[1:]:
        packages = sorted(member.folder.glob("src/*/__init__.py"))
        if len(packages) != 1:
            yield (
                f"{at(root, member.folder / 'pyproject.toml')}: src must hold one package; "
                f"it holds {len(packages)}"
            )
        for pattern in SKELETON:
            wanted = pattern.format(name=member.name)
            if not any(member.folder.glob(wanted)):
                project = at(root, member.folder / "pyproject.toml")
                yield f"{project}: the package lacks {wanted}; see CONTRIBUTING.md"


def vague_names(root: Path) -> Iterator[str]:
    for path in files(root, ".py"):
        parts = [*path.relative_to(root).parts[:-1], path.stem]
        for part in parts:
            words = part.strip("_").split("_")
            if part.strip("_") in VAGUE or words[-1] in VAGUE:
                yield f"{at(root, path)}: {part!r} says nothing; name it for what it holds"


def kernels_without_header(root: Path) -> Iterator[str]:
    for member in members(root):
        for path in files(member.folder, ".py"):
            if "kernels" not in path.parent.parts or path.name == "__init__.py":
                continue
            header = ast.get_docstring(ast.parse(path.read_text())) or ""
            lacking = [f for f in KERNEL_FIELDS if not re.search(rf"^\s*{f}\s", header, re.M)]
            if lacking:
                yield f"{at(root, path)}: the kernel's docstring lacks {', '.join(lacking)}"


def long_files(root: Path) -> Iterator[str]:
    for path in files(root, ".py", ".cpp", ".cu", ".h", ".md", ".toml", ".html", "Makefile", "run"):
        lines = path.read_bytes().count(b"\n")
        if lines > MAX_LINES:
            yield f"{at(root, path, MAX_LINES)}: {lines} lines; over {MAX_LINES}, two ideas: split"


def direct_references(root: Path) -> Iterator[str]:
    for member in members(root):
        project = member.folder / "pyproject.toml"
        for requirements in member.requirements().values():
            for requirement in requirements:
                if "@" in requirement:
                    yield (
                        f"{at(root, project, line_of(project, requirement))}: {requirement!r} is "
                        "tied to one place; give a version range"
                    )


def machine_names(root: Path) -> Iterator[str]:
    """What holds on one machine only: this checkout's place, home folders, a registry's address."""
    # A single folder, like /src in a container, would also be found where it means something else.
    own = [re.escape(str(place)) for place in (root, Path.home()) if len(place.parts) > 2]
    places = "|".join([*own, r"/(?:home|root|Users)/\w"])
    pattern = re.compile(
        rf"(?<![\w.\-/{{}}*)\]])(?:{places})|--(?:extra-)?index.url|download\.pytorch\.org"
    )
    for path in files(root):
        try:
            lines = path.read_text().splitlines()
        except UnicodeDecodeError:
            continue
        for number, line in enumerate(lines, 1):
            if found := pattern.search(line):
                yield f"{at(root, path, number)}: {found[0]!r} belongs to one machine; remove it"


def requirement_lines(root: Path) -> list[str]:
    path = root / "ci" / "no-deps.txt"
    lines = path.read_text().splitlines() if path.exists() else []
    return [line for line in lines if line.strip() and not line.startswith("#")]


def line_of(path: Path, text: str) -> int:
    lines = path.read_text().splitlines()
    return next((number for number, line in enumerate(lines, 1) if text in line), 1)


RULES: list[Callable[[Path], Iterator[str]]] = [
    sibling_imports,
    undeclared_imports,
    unused_declarations,
    missing_files,
    vague_names,
    kernels_without_header,
    long_files,
    direct_references,
    machine_names,
]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_checkout_keeps(rule: Callable[[Path], Iterator[str]]) -> None:
    problems = list(rule(ROOT))
    if problems:
        pytest.fail("\n".join(problems), pytrace=False)


# --- each rule fails on a tree that breaks it -------------------------------------------------

HEADER = '''"""Copies rows.

grid      one program per tile
bound by  memory
accepts   any N >= 0
source    Section 3; oracle: reference.copy
"""
'''


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A small checkout that keeps every rule: shared and two systems."""
    contents = {"shared/src/septet_shared/__init__.py": "import numpy\n"}
    contents["shared/pyproject.toml"] = (
        "[project]\nname = 'septet-shared'\ndependencies = ['numpy']"
    )
    for name in ("left", "right"):
        folder = f"packages/{name}"
        contents[f"{folder}/pyproject.toml"] = (
            f"[project]\nname = '{name}'\ndependencies = ['septet-shared>=0.1']\n"
            "[project.optional-dependencies]\ntest = ['pytest>=8']\n"
        )
        for pattern in SKELETON:
            contents[f"{folder}/{pattern.format(name=name).replace('*', 'idea')}"] = ""
        contents[f"{folder}/src/{name}/__init__.py"] = "import septet_shared\nimport os\n"
        contents[f"{folder}/src/{name}/kernels/copy_rows.py"] = HEADER
        contents[f"{folder}/tests/test_idea.py"] = f"import pytest\nimport {name}\n"
    for path, text in contents.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    return tmp_path


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_a_good_tree_keeps(rule: Callable[[Path], Iterator[str]], tree: Path) -> None:
    assert list(rule(tree)) == []


LEFT = "packages/left/src/left"
PROJECT = "packages/left/pyproject.toml"
BROKEN = [
    (sibling_imports, f"{LEFT}/cli.py", "import os\nimport right.cli", f"{LEFT}/cli.py:2: .*right"),
    (sibling_imports, f"{LEFT}/cli.py", "def f():\n    from right import x", "cli.py:2: .*right"),
    (sibling_imports, "packages/left/tests/test_idea.py", "import right", "test_idea.py:1"),
    (sibling_imports, f"{LEFT}/cli.py", "import_module('right.cli')", "cli.py:1: .*right"),
    (sibling_imports, "shared/src/septet_shared/a.py", "import left", "a.py:1: .*left"),
    (undeclared_imports, f"{LEFT}/cli.py", "import numpy", r"cli.py:1: .*numpy.*pyproject"),
    (undeclared_imports, f"{LEFT}/cli.py", "def f():\n    import pytest", "cli.py:2: .*pytest"),
    (undeclared_imports, "packages/left/tests/test_idea.py", "import numpy", "py:1: .*`test`"),
    (unused_declarations, "shared/src/septet_shared/__init__.py", "", "shared/.*:3: .*'numpy'"),
    (unused_declarations, "packages/left/tests/test_idea.py", "", "left/.*:5: .*'pytest>=8'"),
    (missing_files, f"{LEFT}/cli.py", None, "left/pyproject.toml:1: .*src/left/cli.py"),
    (missing_files, "packages/left/benchmarks/bench_idea.py", None, r"lacks benchmarks/bench_\*"),
    (missing_files, "packages/left/src/more/__init__.py", "", "holds 2"),
    (vague_names, f"{LEFT}/utils.py", "", "left/utils.py:1: 'utils'"),
    (vague_names, f"{LEFT}/_helpers/a.py", "", "'_helpers'"),
    (vague_names, f"{LEFT}/tensor_utils.py", "", "'tensor_utils'"),
    (kernels_without_header, f"{LEFT}/kernels/a.py", '"""No header."""', "lacks grid, bound by"),
    (kernels_without_header, f"{LEFT}/kernels/a.py", HEADER.replace("accepts", "take"), "accepts$"),
    (long_files, f"{LEFT}/native/a.cpp", "int a;\n" * 801, "a.cpp:800: 801 lines"),
    (
        direct_references,
        PROJECT,
        "[project]\nname = 'left'\ndependencies = ['b @ file:c']",
        "pyproject.toml:3: 'b @",
    ),
    (machine_names, f"{LEFT}/cli.py", "a = '<root>/x'", "cli.py:1"),
    (machine_names, "README.md", f"see {'/home'}/someone/x", "README.md:1"),
    (machine_names, "Makefile", f"pip --{'index'}-url x", "Makefile:1"),
]


@pytest.mark.parametrize(("rule", "path", "text", "expected"), BROKEN)
def test_a_broken_tree_is_told_where_and_what(
    rule: Callable[[Path], Iterator[str]],
    path: str,
    text: str | None,
    expected: str,
    tree: Path,
) -> None:
    target = tree / path
    if text is None:
        target.unlink()
    else:
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text.replace("<root>", str(tree)))
    problems = list(rule(tree))
    assert len(problems) == 1, problems
    assert re.search(expected, problems[0]), problems[0]
