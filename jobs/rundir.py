"""The run directory: made exclusively, locked while it is written, its config stored and honoured later."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import secrets
import shutil
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
# what every verb may change in a run that exists: nothing of it can change a result of the experts
_FREE = ("engine", "tracking", "controls", "baselines")
# what a later verb asks rather than what the run is
_QUESTIONS = ("output", "resume", "run", "watch", "input", "prompt", "sample", "temperature", "experts", "state")
_VERSIONS_OF = ("colonnade", "torch", "numpy", "numba", "zarr", "hydra-core", "mlflow")


def name_of(config: DictConfig) -> Path:
    """The run directory that the config names, or a new name; a job of a multirun gets its own."""
    from hydra.core.hydra_config import HydraConfig

    if is_multirun():
        # the command line has made run=DIR the sweep directory
        return Path(HydraConfig.get().sweep.dir) / str(HydraConfig.get().job.num)
    if config.run in (None, ""):
        return Path("runs") / f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(3)}"
    return Path(str(config.run)).expanduser()


def is_multirun() -> bool:
    """Whether this is a job of a sweep."""
    from hydra.core.hydra_config import HydraConfig
    from hydra.types import RunMode

    return HydraConfig.initialized() and HydraConfig.get().mode == RunMode.MULTIRUN


def is_run(run: Path) -> bool:
    """Whether a run has begun in a directory."""
    return (run / "config.yaml").is_file()


def require(config: DictConfig) -> Path:
    """The existing run directory that a later verb works on."""
    if config.run in (None, ""):
        raise UserError("run: not given; name a run directory, as in run=runs/20260101-120000-abc123")
    run = Path(str(config.run)).expanduser()
    if not run.is_dir():
        raise UserError(f"run={run}: no such folder; name a run directory")
    if not is_run(run):
        raise UserError(f"run={run}: holds no config.yaml, so it is not a run directory; name one")
    return run


class Interrupted(KeyboardInterrupt):
    """Ctrl-C while a run directory was held."""

    def __init__(self, run: Path) -> None:
        super().__init__(str(run))
        self.run = run


@contextlib.contextmanager
def locked(run: Path) -> Iterator[None]:
    """Hold the run directory against other launchers; the lock goes with the process, however it ends."""
    path = run / LOCK
    with open(path, "a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            holder = file.read().strip() or "another process"
            raise UserError(f"run={run}: in use by {holder}; wait for it, or end it") from None
        file.seek(0)
        file.truncate()
        file.write(f"process {os.getpid()} on {os.uname().nodename}")
        file.flush()
        try:
            yield
        except KeyboardInterrupt:
            raise Interrupted(run) from None


@contextlib.contextmanager
def created(run: Path) -> Iterator[None]:
    """Make a run directory and hold it; UserError if there is something in it already."""
    try:
        run.mkdir(parents=True, exist_ok=True)
        _refuse_used(run)
    except (NotADirectoryError, FileExistsError):
        raise UserError(f"run={run}: is a file, or lies below one; name a folder") from None
    with locked(run):
        # another launcher may have been faster
        _refuse_used(run)
        yield


def _refuse_used(run: Path) -> None:
    if any(entry.name != LOCK for entry in run.iterdir()):
        raise UserError(f"run={run}: is not empty; name a new folder, or go on with its run by resume=true")


@contextlib.contextmanager
def whole_or_gone(run: Path) -> Iterator[None]:
    """Remove a run directory again where a mistake or a full disk ends what is done first in it."""
    try:
        yield
    except (UserError, OSError):
        shutil.rmtree(run, ignore_errors=True)
        raise


def store(run: Path, config: DictConfig) -> None:
    """Write config.yaml (config, versions, revision) of a new run and what Hydra knows of the command line."""
    _write_facts(
        run,
        {
            "schema": SCHEMA,
            "versions": _versions(),
            "git_revision": _revision(),
            "preset": chosen_preset(),
            "seed": config.seed,
            "digests": {},
            "history": [],
            "config": plain(config),
        },
    )
    from hydra.core.hydra_config import HydraConfig

    if HydraConfig.initialized():
        folder = run / ".hydra"
        folder.mkdir(exist_ok=True)
        hydra = HydraConfig.get()
        write_bytes_atomic(folder / "overrides.yaml", OmegaConf.to_yaml(hydra.overrides.task).encode())
        write_bytes_atomic(folder / "config.yaml", yaml.safe_dump(plain(config), sort_keys=False).encode())
        write_bytes_atomic(folder / "hydra.yaml", OmegaConf.to_yaml(OmegaConf.structured(hydra)).encode())


def stored_config(facts: dict[str, Any]) -> DictConfig:
    """The config that a run was made with, of `load_facts`."""
    found = OmegaConf.create(escaped(facts["config"]))
    assert isinstance(found, DictConfig)
    return found


def store_digests(run: Path, digests: dict[str, str]) -> None:
    """Note the digests of source, relay and router in config.yaml."""
    _write_facts(run, {**load_facts(run), "digests": digests})


def record(run: Path, config: DictConfig, verb: str) -> None:
    """Note in config.yaml what a later verb was asked to do differently, and the config that results."""
    overrides = [override for override in command_line() if override.split("=")[0].lstrip("+") not in _QUESTIONS]
    if overrides:
        facts = load_facts(run)
        entry = {"verb": verb, "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"), "overrides": overrides}
        history = [*facts.get("history", []), entry]
        _write_facts(run, {**facts, "history": history, "config": plain(config)})


def _write_facts(run: Path, facts: dict[str, Any]) -> None:
    write_bytes_atomic(run / "config.yaml", yaml.safe_dump(facts, sort_keys=False).encode())


def chosen_preset() -> str | None:
    """The preset of this command line; None outside of one."""
    from hydra.core.hydra_config import HydraConfig

    return HydraConfig.get().runtime.choices.get("preset") if HydraConfig.initialized() else None


def command_line() -> list[str]:
    """The overrides of this command line; none outside of one."""
    from hydra.core.hydra_config import HydraConfig

    if not HydraConfig.initialized():
        return []
    found = OmegaConf.to_container(HydraConfig.get().overrides.task, resolve=False)
    assert isinstance(found, list)
    return [str(entry) for entry in found]


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


def merged(run: Path, config: DictConfig, may_change: tuple[str, ...] = (), own: tuple[str, ...] = ()) -> DictConfig:
    """The run's stored config with what was asked for on the command line on top.

    Args:
        run: an existing run directory.
        config: as composed from the command line.
        may_change: top-level fields that the verb may change besides engine, tracking and controls.
        own: fields that mean something else to the verb, which reads them itself; the run's stay as they are.

    Raises:
        UserError: an override that would change what the run is.
    """
    facts = load_facts(run)
    stored = stored_config(facts)
    OmegaConf.set_struct(stored, True)
    for field, value in asked_for(config):
        top = field.split(".")[0]
        if top in _QUESTIONS or field in own:
            continue
        if field == "preset":
            if value != facts.get("preset"):
                raise UserError(f"preset={value}: the run was made with preset={facts.get('preset')}; start a new run")
            continue
        before = OmegaConf.select(stored, field)
        if top not in _FREE + may_change and plain_value(before) != plain_value(value):
            raise UserError(
                f"{field}: cannot change in a run that exists, since its result would; start a new run, "
                f"or leave it at {plain_value(before)}"
            )
        OmegaConf.update(stored, field, escaped(plain_value(value)), force_add=True)
    for field in _QUESTIONS:
        OmegaConf.update(stored, field, escaped(plain_value(config[field])), force_add=True)
    return stored


def plain_value(value: Any) -> Any:
    """A config value without OmegaConf around it."""
    return OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value


def asked_for(config: DictConfig) -> list[tuple[str, Any]]:
    """(field, value) of every override on the command line; a group (estimator=spsa) stands as a whole."""
    from hydra.core.override_parser.overrides_parser import OverridesParser

    found = []
    for override in OverridesParser.create().parse_overrides(command_line()):
        field = override.key_or_group
        found.append((field, chosen_preset() if field == "preset" else OmegaConf.select(config, field)))
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
