"""The command line: takes the verb, hands the rest to Hydra, and turns what goes wrong into one line.

Exit codes: 0 done, 1 a bug (with its traceback), 2 a mistake of the user's, 130 interrupted.
"""

from __future__ import annotations

import contextlib
import errno
import importlib
import json
import os
import shlex
import signal
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

from ..kernels.errors import UserError
from . import argv as arguments
from . import code

VERBS = {
    "train": "all of it: partition, plan, launch, aggregate, evaluate",
    "partition": "read the source, fit relay and router, assign the inputs to experts",
    "plan": "cut the experts into groups",
    "launch": "train the groups that are not finished (resume=true after an interruption)",
    "status": "what is done, running, pending and failed",
    "aggregate": "check the bank, list the experts, fit the mixing weights",
    "evaluate": "score the held-out split",
    "predict": "bits of a file's bytes (input=FILE), or a text continued (prompt=... sample=200)",
}
_DISK_ERRORS = {errno.ENOSPC: "the disk is full", errno.EDQUOT: "the quota is used up", errno.EROFS: "read-only",
                errno.EFBIG: "the file would be larger than is allowed"}  # fmt: skip


def usage() -> str:
    """The help of `colonnade` itself."""
    width = max(map(len, VERBS))
    rows = "\n".join(f"  {verb:<{width}}  {what}" for verb, what in VERBS.items())
    return (
        "usage: colonnade VERB [name=value ...]\n\n"
        f"{rows}\n\n"
        "  colonnade train preset=smoke           a small run\n"
        "  colonnade train --cfg job              every field and its value\n"
        "  colonnade train preset=smoke -m seed=1,2\n"
    )


def main(argv: list[str] | None = None) -> int:
    """Run one verb; returns the exit code."""
    argv = list(sys.argv[1:] if argv is None else argv)
    if not argv or argv[0] in ("-h", "--help", "help"):
        print(usage(), end="")
        return 0
    if argv[0] == "--version":
        from importlib.metadata import version

        print(version("colonnade"))
        return 0
    verb, *rest = argv
    try:
        if verb not in VERBS:
            raise UserError(f"{verb}: no such verb; known: {', '.join(VERBS)}")
        code.allow_from(rest)
        with _sweep_directory(verb, rest) as more:
            _run(verb, [*arguments.for_hydra(rest), *more])
        sys.stdout.flush()
        return 0
    except UserError as error:
        return _complain(str(error))
    except KeyboardInterrupt as interruption:
        # a second Ctrl-C has done its work by now; in the middle of leaving it would only spoil the exit code
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        run = getattr(interruption, "run", None)
        hint = (
            f"go on with: colonnade train run={shlex.quote(str(run))} resume=true" if run else "nothing was left open"
        )
        print(f"\ncolonnade: interrupted; what is committed is kept; {hint}", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # whoever read our output has left; nothing more can be said
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception as error:
        trouble = _trouble_with_files(error)
        if trouble is None:
            raise
        return _complain(trouble)


def _trouble_with_files(error: BaseException | None) -> str | None:
    """One line where an error, or what caused it, is a full disk or a place that may not be used; None otherwise."""
    while error is not None:
        if isinstance(error, OSError):
            if error.errno in _DISK_ERRORS:
                where = error.filename or "writing"
                return f"{where}: {_DISK_ERRORS[error.errno]}; make room, then start again, or go on with resume=true"
            if isinstance(error, PermissionError):
                where = error.filename or "a file"
                return f"{where}: permission denied; choose another place or mend its rights"
        error = error.__cause__ or error.__context__
    return None


def _complain(message: str) -> int:
    print(f"colonnade: {' '.join(message.split())}", file=sys.stderr)
    return 2


@contextlib.contextmanager
def _sweep_directory(verb: str, tokens: list[str]) -> Iterator[list[str]]:
    """Overrides that say where a sweep keeps Hydra's own files.

    A sweep of new runs has them beside its runs: in run=DIR if given. One over a run that exists has them nowhere.
    """
    run = arguments.text_of(tokens, "run")
    if not arguments.is_multirun(tokens):
        yield []
    elif verb not in ("train", "partition"):
        with tempfile.TemporaryDirectory() as folder:
            yield [f"hydra.sweep.dir={arguments.quote(folder)}"]
    else:
        yield [f"hydra.sweep.dir={arguments.quote(run)}"] if run else []


def _run(verb: str, tokens: list[str]) -> None:
    import hydra
    from hydra.errors import HydraException
    from omegaconf import DictConfig, OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    errors: list[Exception] = []

    def task(config: DictConfig) -> None:
        try:
            OmegaConf.to_container(config, resolve=True)
        except OmegaConfBaseException as error:
            errors.append(UserError(arguments.explain(error, [])))
            return
        # Hydra adds lines of its own to what it catches, so it gets to see nothing; a sweep goes on
        try:
            _run_verb(verb, config)
        except Exception as error:
            errors.append(error)

    os.environ["HYDRA_FULL_ERROR"] = "1"
    sys.argv = [f"colonnade {verb}", *tokens]
    try:
        hydra.main(version_base="1.3", config_path="pkg://colonnade.conf", config_name="config")(task)()
    except (HydraException, OmegaConfBaseException) as error:
        raise UserError(arguments.explain(error, _known_fields())) from None
    # a bug goes before mistakes; of several mistakes in a sweep, each gets its line
    errors.sort(key=lambda error: isinstance(error, UserError))
    for error in errors[1:]:
        _complain(str(error))
    if errors:
        raise errors[0]


def _run_verb(verb: str, config: Any) -> None:
    if str(config.output) not in ("table", "json"):
        raise UserError(f"output={config.output}: unknown; known: table, json")
    module: Any = importlib.import_module(f"colonnade.jobs.verbs.{verb}")
    result = module.run(config)
    if str(config.output) == "json":
        print(json.dumps(result, allow_nan=False), flush=True)
    else:
        text = module.render(result)
        if text:
            print(text, flush=True)


def _known_fields() -> list[str]:
    """Dotted names of all fields of the default config."""
    from hydra import compose, initialize_config_module
    from hydra.core.global_hydra import GlobalHydra

    GlobalHydra.instance().clear()
    with initialize_config_module("colonnade.conf", version_base="1.3"):
        config = compose("config")

    def walk(node: Any, prefix: str) -> list[str]:
        names = []
        for key in node:
            names.append(f"{prefix}{key}")
            value = node._get_node(key)
            if hasattr(value, "keys"):
                names += walk(value, f"{prefix}{key}.")
        return names

    return walk(config, "")


if __name__ == "__main__":
    sys.exit(main())
