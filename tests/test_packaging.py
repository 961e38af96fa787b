import ast
import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("router", "experts", "ensemble", "kernels", "jobs", "conf")
MAY_IMPORT = {
    "kernels": {"kernels"},
    "router": {"router", "kernels"},
    "experts": {"experts", "kernels"},
    "ensemble": {"ensemble", "experts", "router", "kernels"},
    "jobs": {"jobs", "ensemble", "experts", "router", "kernels", "conf"},
    "conf": set(),
}


def test_packages_are_exactly_the_folders():
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    found = ["colonnade"]
    for folder in FOLDERS:
        for init in (ROOT / folder).rglob("__init__.py"):
            found.append(".".join(("colonnade", *init.parent.relative_to(ROOT).parts)))
    assert sorted(listed) == sorted(found)
    for folder in FOLDERS:
        for module in (ROOT / folder).rglob("*.py"):
            assert (module.parent / "__init__.py").exists(), module


def test_imports_run_one_way():
    for folder in FOLDERS:
        for module in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(module.read_text())):
                if isinstance(node, ast.Import):
                    names = [alias.name for alias in node.names]
                    assert not any(name.split(".")[0] == "colonnade" for name in names), module
                elif isinstance(node, ast.ImportFrom):
                    if node.level == 0:
                        assert (node.module or "").split(".")[0] != "colonnade", module
                        continue
                    parts = ("colonnade", *module.relative_to(ROOT).parts[:-1])
                    target = (*parts[: len(parts) - node.level + 1], *(node.module or "").split("."))
                    assert target[1] in MAY_IMPORT[folder], f"{module} imports {'.'.join(target)}"


def test_the_root_package_is_bare():
    body = ast.parse((ROOT / "__init__.py").read_text()).body
    assert len(body) == 1
    assert isinstance(body[0], ast.Expr)


def test_only_jobs_reads_configuration():
    for folder in ("router", "experts", "ensemble", "kernels"):
        for module in (ROOT / folder).rglob("*.py"):
            assert not re.search(r"\b(hydra|omegaconf)\b", module.read_text()), module


def test_nothing_is_unpickled():
    for folder in FOLDERS:
        for module in (ROOT / folder).rglob("*.py"):
            text = module.read_text()
            assert not re.search(
                r"\bimport pickle\b|allow_pickle=True|torch\.load\(|yaml\.load\(|\beval\(|\bexec\(", text
            ), module


def test_constraints_pin_torch_and_leave_triton_to_it():
    text = (ROOT / "constraints.txt").read_text()
    assert "torch==2.13.0" in text.splitlines()
    assert not re.search(r"^triton", text, re.MULTILINE)
