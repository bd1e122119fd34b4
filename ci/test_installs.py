"""Each system, installed alone into a fresh environment, is whole: from folders and from wheels.

An environment sees the interpreter's standard library and links to the third parties that the
system's metadata asks for, taken from the environment that runs this test: a dependency that
somebody forgot to declare is missing there, as it is for a user, and nothing heavy is copied.
"""

import importlib.metadata
import json
import os
import re
import subprocess
import sys
import zipfile
from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parent.parent
SHARED = ROOT / "shared"
SYSTEMS = sorted(p.parent for p in ROOT.glob("packages/[!.]*/pyproject.toml"))
CONSTRAINTS = (ROOT / "ci" / "constraints-cpu.txt").as_uri()
TIMEOUT_S = 300


def import_name(folder: Path) -> str:
    return next(folder.glob("src/*/__init__.py")).parent.name


OURS = [import_name(folder) for folder in [SHARED, *SYSTEMS]]


def output(command: Sequence[str | Path], folder: Path) -> str:
    """What a command prints; it gets no PYTHON* variable, so that it sees its own packages only."""
    variables = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
    variables |= {"PIP_CONSTRAINT": CONSTRAINTS, "PIP_BUILD_CONSTRAINT": CONSTRAINTS}
    done = subprocess.run(
        [str(word) for word in command],
        cwd=folder,
        env=variables,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    if done.returncode:
        said = f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
        pytest.fail(f"{' '.join(map(str, command))}\nstatus {done.returncode}\n{said}")
    return done.stdout


# --- wheels -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> dict[Path, Path]:
    """Folder of a distribution -> its wheel, built by the backend that its pyproject names."""
    built = {}
    for folder in [SHARED, *SYSTEMS]:
        place = tmp_path_factory.mktemp(folder.name)
        output([sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", place], folder)
        (built[folder],) = place.glob("*.whl")
    return built


def requirements(wheel: Path, extras: frozenset[str] = frozenset()) -> list[Requirement]:
    """What a wheel's metadata asks for on this machine, with these extras."""
    with zipfile.ZipFile(wheel) as archive:
        (path,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        text = archive.read(path).decode()
    lines = re.findall(r"^Requires-Dist: (.+)$", text.partition("\n\n")[0], re.M)
    return [r for r in map(Requirement, lines) if applies(r, extras)]


def applies(requirement: Requirement, extras: frozenset[str]) -> bool:
    marker = requirement.marker
    return marker is None or any(marker.evaluate({"extra": e}) for e in {"", *extras})


@pytest.mark.parametrize("folder", [SHARED, *SYSTEMS], ids=lambda folder: folder.name)
def test_a_wheel_holds_every_file_of_its_package(folder: Path, wheels: dict[Path, Path]) -> None:
    package = folder / "src" / import_name(folder)
    made = ("__pycache__", ".so", ".pyc")
    written = {
        path.relative_to(folder / "src").as_posix()
        for path in package.rglob("*")
        if path.is_file() and not path.as_posix().endswith(made) and "__pycache__" not in path.parts
    }
    with zipfile.ZipFile(wheels[folder]) as archive:
        packed = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert f"{package.name}/py.typed" in packed
    assert packed == written


@pytest.mark.parametrize("folder", [SHARED, *SYSTEMS], ids=lambda folder: folder.name)
def test_a_wheel_is_tied_to_no_place(folder: Path, wheels: dict[Path, Path]) -> None:
    assert wheels[folder].name.endswith("-py3-none-any.whl")
    assert [str(r) for r in requirements(wheels[folder]) if r.url] == []


# --- a fresh environment with one system ------------------------------------------------------


def third_parties(
    asked: list[Requirement], ours: set[str]
) -> dict[str, importlib.metadata.Distribution]:
    """Everything these requirements bring along that is not ours, from the running environment."""
    found: dict[str, importlib.metadata.Distribution] = {}
    seen = set()
    while asked:
        requirement = asked.pop()
        name = normal(requirement.name)
        extras = frozenset(requirement.extras)
        if name in ours or (name, extras) in seen:
            continue
        seen.add((name, extras))
        found[name] = importlib.metadata.distribution(name)
        asked += [r for r in map(Requirement, found[name].requires or []) if applies(r, extras)]
    return found


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def link_third_parties(
    target: Path, distributions: Iterable[importlib.metadata.Distribution]
) -> None:
    """Links in `target` to every top-level file and folder of these distributions."""
    target.mkdir()
    for distribution in distributions:
        tops = {Path(file.parts[0]) for file in distribution.files or []}
        for top in tops - {Path(".."), Path("__pycache__"), Path("/")}:
            link = target / top
            if not link.exists():
                link.symlink_to(Path(str(distribution.locate_file(top))).resolve())


@pytest.fixture(scope="module", params=SYSTEMS, ids=lambda folder: folder.name)
def system(request: pytest.FixtureRequest) -> Path:
    return Path(request.param)


@pytest.fixture(scope="module", params=["folders", "wheels"])
def python(
    request: pytest.FixtureRequest,
    system: Path,
    wheels: dict[Path, Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Path:
    """The interpreter of a fresh environment into which pip has put shared and one system."""
    environment = tmp_path_factory.mktemp(f"{system.name}-{request.param}")
    output([sys.executable, "-m", "venv", "--without-pip", environment], environment)
    asked = requirements(wheels[SHARED]) + requirements(wheels[system])
    # Beside site-packages, where pip may look but does not uninstall: the targets are in use.
    linked = environment / "third-parties"
    ours = {normal(wheel.name.partition("-")[0]) for wheel in wheels.values()}
    link_third_parties(linked, third_parties(asked, ours).values())
    (packages,) = environment.glob("lib/python*/site-packages")
    (packages / "third-parties.pth").write_text(f"{linked}\n")
    interpreter = environment / "bin" / "python"
    pip: list[str | Path] = [
        sys.executable,
        "-m",
        "pip",
        "--python",
        interpreter,
        "install",
        "--quiet",
    ]
    if request.param == "folders":
        output([*pip, SHARED, system], environment)
    else:
        output([*pip, "--no-index", wheels[SHARED], wheels[system]], environment)
    return interpreter


def test_shared_came_from_the_checkout(
    python: Path, request: pytest.FixtureRequest, wheels: dict[Path, Path], tmp_path: Path
) -> None:
    program = (
        "import importlib.metadata as m\n"
        "print(m.distribution('septet-shared').read_text('direct_url.json'))"
    )
    url = json.loads(output([python, "-c", program], tmp_path))["url"]
    from_wheels = "wheels" in request.node.callspec.params.values()
    assert url == (wheels[SHARED] if from_wheels else SHARED).as_uri()


def test_no_sibling_is_importable(python: Path, system: Path, tmp_path: Path) -> None:
    program = (
        "import importlib.util as u, json\n"
        f"print(json.dumps([name for name in {OURS!r} if u.find_spec(name)]))"
    )
    found = json.loads(output([python, "-c", program], tmp_path))
    assert found == ["septet_shared", import_name(system)]


def test_doctor_runs_from_any_folder(python: Path, system: Path, tmp_path: Path) -> None:
    report = json.loads(output([python, "-m", import_name(system), "doctor", "--json"], tmp_path))
    assert report["versions"]["septet-shared"]
    assert {"versions", "compiler", "devices", "backends", "advice"} <= set(report)


def test_the_quickstart_runs_from_any_folder(python: Path, system: Path, tmp_path: Path) -> None:
    copied = tmp_path / "quickstart.py"
    copied.write_text((system / "examples" / "quickstart.py").read_text())
    assert output([python, copied], tmp_path).strip()
