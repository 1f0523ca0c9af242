"""What is installed is what stands here, and no floor of the house reaches up."""

import ast
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FLOORS = ("kernels", "scheduler", "workers", "cluster")
# what a floor may import: other floors, and packages besides the standard library; None: any package
MAY_IMPORT = {
    "kernels": ({"kernels"}, {"torch", "triton", "numpy"}),
    "scheduler": ({"scheduler"}, set()),
    "workers": (
        {"workers", "scheduler", "kernels"},
        {"torch", "numpy", "transformers", "tokenizers", "safetensors", "gguf", "huggingface_hub", "tqdm", "psutil"},
    ),
    "cluster": ({"cluster", "workers", "scheduler", "kernels"}, None),
    "pagedray": ({"pagedray", "cluster", "scheduler"}, set()),
}
MODULES = sorted(p for folder in MAY_IMPORT for p in (ROOT / folder).rglob("*.py"))


def settings():
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def packages_that_stand_here():
    """The dotted names of all folders that hold Python, as they are imported."""
    found = {"pagedray"}
    for floor in FLOORS:
        for path in (ROOT / floor).rglob("*.py"):
            found.add(".".join(["pagedray", *path.parent.relative_to(ROOT).parts]))
    return found


def imports(path, source=None):
    """(line, floor or None, name) of each import, relative ones resolved; imports for type checkers are counted too."""
    package = path.relative_to(ROOT).parent.parts
    package = package if package[0] == "pagedray" else ("pagedray", *package)
    for node in ast.walk(ast.parse(path.read_text() if source is None else source)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level:
            base = package[: len(package) - node.level + 1]
            # `from .. import x`: x itself may be a floor
            parts = [node.module] if node.module else [alias.name for alias in node.names]
            names = [".".join([*base, part]) for part in parts]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or ""]
        else:
            continue
        for name in names:
            parts = name.split(".")
            if parts[0] == "pagedray":
                yield node.lineno, parts[1] if len(parts) > 1 and parts[1] in FLOORS else "pagedray", name
            else:
                yield node.lineno, None, name


def violations(path, source=None):
    floors, libraries = MAY_IMPORT[path.relative_to(ROOT).parts[0]]
    for line, floor, name in imports(path, source):
        where = f"{path.relative_to(ROOT)}:{line}: imports {name}"
        top = name.split(".")[0]
        if floor is None and top in FLOORS:
            yield f"{where}, which is ours: say it relatively"
        elif floor == "pagedray" and name == "pagedray.__version__":
            continue  # the version is nobody's floor
        elif floor is not None and floor not in floors:
            yield f"{where}, a floor above"
        elif floor is None and libraries is not None and top not in libraries | sys.stdlib_module_names:
            yield f"{where}, which is not for this floor"


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(ROOT)))
def test_floors(path):
    assert list(violations(path)) == []


@pytest.mark.parametrize(
    ("path", "source", "wrong"),
    [
        ("scheduler/x.py", "import torch", True),
        ("scheduler/x.py", "from ..workers.config import EngineConfig", True),
        ("scheduler/x.py", "def f():\n    from .. import cluster", True),
        ("scheduler/x.py", "import json, heapq\nfrom .errors import ConfigError", False),
        ("workers/models/x.py", "from ...cluster.llm import LLM", True),
        ("workers/models/x.py", "import ray", True),
        ("workers/models/x.py", "from ...kernels import ops\nfrom ..config import ModelConfig", False),
        ("kernels/cpu/x.py", "from ...scheduler.errors import ConfigError", True),
        ("kernels/cpu/x.py", "from .. import reference", False),
        ("cluster/x.py", "import kernels", True),
        ("cluster/x.py", "from scheduler.errors import ConfigError", True),
        ("cluster/x.py", "from .. import __version__\nimport ray", False),
    ],
)
def test_the_check_of_floors_itself(path, source, wrong):
    assert bool(list(violations(ROOT / path, source))) is wrong


def test_every_folder_is_listed():
    listed = settings()["tool"]["setuptools"]["packages"]
    assert sorted(listed) == sorted(packages_that_stand_here()), "setuptools drops a package that is not listed"


def test_one_version():
    from pagedray import __version__

    assert settings()["project"]["version"] == __version__


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    pytest.importorskip("setuptools", reason="setuptools is not installed: it builds the wheel", minversion="77")
    folder = tmp_path_factory.mktemp("wheel")
    tree = folder / "tree"
    tree.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE", "pagedray", *FLOORS):
        # from a copy: setuptools leaves build/ and egg-info behind, and would take up what lies in an old one
        subprocess.run(["cp", "-r", str(ROOT / name), str(tree)], check=True)
    build = [
        "wheel",
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
        "--no-index",
        "--wheel-dir",
        str(folder),
        str(tree),
    ]
    subprocess.run([sys.executable, "-m", "pip", *build], check=True, timeout=120)
    (path,) = folder.glob("*.whl")
    with zipfile.ZipFile(path) as archive:
        return set(archive.namelist())


def test_the_wheel_has_every_module_and_nothing_beside_pagedray(wheel):
    tops = {name.split("/")[0] for name in wheel}
    assert {t for t in tops if not t.endswith(".dist-info")} == {"pagedray"}
    ours = {p.relative_to(ROOT) for p in MODULES}
    here = {str(p if p.parts[0] == "pagedray" else Path("pagedray", p)) for p in ours}
    assert {n for n in wheel if n.endswith(".py")} == here


def test_the_wheel_has_the_c_sources(wheel):
    sources = [p for p in (ROOT / "kernels" / "cpu" / "src").iterdir() if p.suffix in (".cpp", ".h")]
    assert sources and {f"pagedray/kernels/cpu/src/{p.name}" for p in sources} <= wheel


def test_the_wheel_has_the_pages_of_the_console(wheel):
    pages = {p.name for p in (ROOT / "cluster" / "console" / "static").iterdir()}
    assert pages >= {"index.html", "console.js", "console.css"}
    assert {f"pagedray/cluster/console/static/{name}" for name in pages} <= wheel


def test_only_kernels_for_gpus_need_triton():
    """Without it everything can be imported but those, which the door opens where there is a GPU."""
    gpu = ROOT / "kernels" / "gpu"
    for path in MODULES:
        at_the_top = [n for n in ast.parse(path.read_text()).body if isinstance(n, ast.Import | ast.ImportFrom)]
        names = {name for _, _, name in imports(path, "\n".join(map(ast.unparse, at_the_top)))}
        if path.parent != gpu or path.name == "formats.py":
            assert not any(name.split(".")[0] == "triton" for name in names), path
        if path.parent != gpu:
            assert {n for n in names if n.startswith("pagedray.kernels.gpu")} <= {"pagedray.kernels.gpu.formats"}, path


@pytest.mark.parametrize(
    ("module", "kept_out"),
    [
        ("pagedray", ["torch", "ray", "transformers"]),
        ("pagedray.cluster.cli", ["torch", "ray", "transformers", "httpx", "pydantic"]),
        ("pagedray.cluster.bench", ["torch", "ray", "transformers"]),
        ("pagedray.cluster.local_server", ["torch", "ray", "transformers"]),
        # What each process of a server does without; every import is in the way of the first token.
        ("pagedray.workers.checkpoint.locate", ["torch", "transformers", "ray"]),
        ("pagedray.cluster.global_scheduler", ["torch", "transformers", "ray.serve", "fastapi", "gguf"]),
        ("pagedray.cluster.worker_group", ["torch", "transformers", "ray.serve", "fastapi", "gguf"]),
        ("pagedray.cluster.app", ["torch", "transformers"]),
        ("pagedray.cluster.status", ["torch", "transformers", "ray", "fastapi"]),
        ("pagedray.cluster.doctor", ["torch", "transformers", "ray", "fastapi"]),
    ],
)
def test_imports_that_are_light(module, kept_out):
    code = f"import sys, {module}; print([m for m in {kept_out} if m in sys.modules])"
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"
    )


def test_help_imports_nothing_heavy():
    code = (
        "import sys\nfrom pagedray.cluster.cli import main\ntry:\n    main(['--help'])\nexcept SystemExit:\n"
        "    print([m for m in ('torch', 'ray', 'transformers', 'numpy', 'pydantic', 'asyncio') if m in sys.modules])"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.splitlines()[-1] == "[]"


def test_our_folders_are_not_top_level_modules():
    """transformers imports a package called `kernels` and would take ours for it."""
    code = f"import importlib.util as u; print([m for m in {FLOORS} if u.find_spec(m)])"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=Path(sys.prefix))
    assert run.stdout.strip() == "[]"
