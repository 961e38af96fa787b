"""The run directory: made exclusively, locked while it is written, its config stored and honoured later."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import secrets
import subprocess
import time
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf

from ..kernels.errors import UserError
from ..kernels.files import write_bytes_atomic
from . import argv as arguments

SCHEMA = 1
LOCK = ".lock"
# what may change when a run goes on: nothing of it can change a result
_FREE = ("engine", "tracking", "output", "resume", "run", "watch", "controls", "baselines")
# what a later verb asks rather than what the run is
_QUESTIONS = ("output", "resume", "run", "watch", "input", "prompt", "sample", "temperature", "experts", "state")
_VERSIONS_OF = ("colonnade", "torch", "numpy", "numba", "zarr", "hydra-core", "mlflow")


def name_of(config: DictConfig) -> Path:
    """The run directory that the config names, or a new name; a job of a multirun gets its own."""
    from hydra.core.hydra_config import HydraConfig
    from hydra.types import RunMode

    given = None if config.run in (None, "") else Path(str(config.run)).expanduser()
    if HydraConfig.initialized() and HydraConfig.get().mode == RunMode.MULTIRUN:
        hydra = HydraConfig.get()
        return (given or Path(hydra.sweep.dir)) / str(hydra.job.num)
    return given or Path("runs") / f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(3)}"


def require(config: DictConfig) -> Path:
    """The existing run directory that a later verb works on."""
    if config.run in (None, ""):
        raise UserError("run: not given; name a run directory, as in run=runs/20260101-120000-abc123")
    run = Path(str(config.run)).expanduser()
    if not run.is_dir():
        raise UserError(f"run={run}: no such folder; name a run directory")
    if not (run / "config.yaml").is_file():
        raise UserError(f"run={run}: holds no config.yaml, so it is not a run directory; name one")
    return run


@contextlib.contextmanager
def locked(run: Path) -> Iterator[None]:
    """Hold the run directory against other launchers; the lock goes with the process, however it ends."""
    path = run / LOCK
    with open(path, "a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            file.seek(0)
            holder = file.read().strip() or "another process"
            raise UserError(f"run={run}: in use by {holder}; wait for it, or end it") from None
        file.seek(0)
        file.truncate()
        file.write(f"process {os.getpid()} on {os.uname().nodename}")
        file.flush()
        yield


def create(run: Path) -> None:
    """Make a run directory; UserError if there is something in it already."""
    try:
        run.mkdir(parents=True, exist_ok=True)
        held = [entry.name for entry in run.iterdir() if entry.name != LOCK]
    except (NotADirectoryError, FileExistsError):
        raise UserError(f"run={run}: is a file, or lies below one; name a folder") from None
    if held:
        raise UserError(f"run={run}: is not empty; name a new folder, or go on with its run by resume=true")


def store(run: Path, config: DictConfig, digests: dict[str, str]) -> None:
    """Write config.yaml (config, versions, revision, digests) and what Hydra knows of the command line."""
    facts = {
        "schema": SCHEMA,
        "versions": _versions(),
        "git_revision": _revision(),
        "seed": config.seed,
        "digests": digests,
        "config": plain(config),
    }
    write_bytes_atomic(run / "config.yaml", yaml.safe_dump(facts, sort_keys=False, allow_unicode=True).encode())
    from hydra.core.hydra_config import HydraConfig

    if HydraConfig.initialized():
        folder = run / ".hydra"
        folder.mkdir(exist_ok=True)
        hydra = HydraConfig.get()
        write_bytes_atomic(folder / "overrides.yaml", OmegaConf.to_yaml(hydra.overrides.task).encode())
        write_bytes_atomic(folder / "config.yaml", yaml.safe_dump(plain(config), sort_keys=False).encode())
        write_bytes_atomic(folder / "hydra.yaml", OmegaConf.to_yaml(OmegaConf.masked_copy(hydra, list(hydra))).encode())


def plain(config: DictConfig) -> dict[str, Any]:
    """The config as plain values, interpolations resolved."""
    found = OmegaConf.to_container(config, resolve=True)
    assert isinstance(found, dict)
    return {str(key): value for key, value in found.items()}


def load_facts(run: Path) -> dict[str, Any]:
    """What `store` wrote; UserError where it cannot be read."""
    path = run / "config.yaml"
    try:
        facts = yaml.safe_load(path.read_text())
        schema = facts["schema"]
        assert isinstance(facts["config"], dict)
    except (OSError, yaml.YAMLError, KeyError, TypeError, AssertionError) as error:
        raise UserError(f"{path}: cannot be read ({error}); restore it or start a new run") from None
    if schema != SCHEMA:
        raise UserError(f"{path}: schema {schema}, this version reads {SCHEMA}; use the version that wrote the run")
    return facts


def merged(run: Path, config: DictConfig, may_change: bool) -> DictConfig:
    """The run's stored config with what was asked for on the command line on top.

    Args:
        run: an existing run directory.
        config: as composed from the command line.
        may_change: False where only overrides that cannot change a result are allowed.
    """
    stored = OmegaConf.create(escaped(load_facts(run)["config"]))
    OmegaConf.set_struct(stored, True)
    for field, value in asked_for(config):
        top = field.split(".")[0]
        if not may_change and top not in _FREE + _QUESTIONS:
            before = OmegaConf.select(stored, field)
            if plain_value(before) != plain_value(value):
                raise UserError(
                    f"{field}: cannot change when a run goes on, since the result would; start a new run, "
                    f"or leave it at {plain_value(before)}"
                )
        OmegaConf.update(stored, field, value, force_add=True)
    for field in _QUESTIONS:
        OmegaConf.update(stored, field, config[field], force_add=True)
    return stored


def plain_value(value: Any) -> Any:
    """A config value without OmegaConf around it."""
    return OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value


def asked_for(config: DictConfig) -> list[tuple[str, Any]]:
    """(field, value) of every override on the command line; a group (estimator=spsa) stands as a whole."""
    from hydra.core.hydra_config import HydraConfig
    from hydra.core.override_parser.overrides_parser import OverridesParser

    if not HydraConfig.initialized():
        return []
    texts = [str(entry) for entry in HydraConfig.get().overrides.task]
    found = []
    for override in OverridesParser.create().parse_overrides(texts):
        field = override.key_or_group
        if field == "preset":
            found += [(key, config[key]) for key in config if key not in _QUESTIONS]
        else:
            found.append((field, OmegaConf.select(config, field)))
    for field in arguments.TEXT_FIELDS:
        value = OmegaConf.select(config, field)
        if value is not None and field not in _QUESTIONS and field in getattr(config, "_texts", ()):
            found.append((field, value))
    return found


def escaped(value: Any) -> Any:
    """Stored values with text as OmegaConf reads it back verbatim."""
    if isinstance(value, dict):
        return {key: escaped(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [escaped(entry) for entry in value]
    return arguments.escape(value) if isinstance(value, str) else value


def _versions() -> dict[str, str | None]:
    found: dict[str, str | None] = {}
    for name in _VERSIONS_OF:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    return found


def _revision() -> str | None:
    """Git revision of the package's own source tree, None where it is not one."""
    root = Path(__file__).resolve().parent.parent
    if not (root / ".git").exists():
        return None
    found = subprocess.run(
        ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=40"],
        capture_output=True,
        text=True,
        check=False,
    )
    return found.stdout.strip() or None


def read_json(path: Path, mend: str) -> Any:
    """JSON of a run's file; UserError that ends in how to mend it."""
    try:
        return json.loads(path.read_text())
    except FileNotFoundError:
        raise UserError(f"{path}: missing; {mend}") from None
    except ValueError as error:
        raise UserError(f"{path}: cannot be read ({error}); {mend}") from None
