"""The command line: takes the verb, hands the rest to Hydra, and turns what goes wrong into one line.

Exit codes: 0 done, 1 a bug (with its traceback), 2 a mistake of the user's, 130 interrupted.
"""

from __future__ import annotations

import errno
import importlib
import json
import os
import sys
from typing import Any

from ..kernels.errors import UserError
from . import argv as arguments

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
_DISK_ERRORS = {errno.ENOSPC: "the disk is full", errno.EDQUOT: "the quota is used up", errno.EROFS: "read-only"}


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
        plain, texts = arguments.split(rest)
        _run(verb, plain, texts)
        sys.stdout.flush()
        return 0
    except UserError as error:
        return _complain(str(error))
    except KeyboardInterrupt:
        print("\ncolonnade: interrupted; what was committed is kept, resume=true goes on", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # whoever read our output has left; nothing more can be said
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        if error.errno in _DISK_ERRORS:
            where = error.filename or "writing"
            return _complain(f"{where}: {_DISK_ERRORS[error.errno]}; make room, then go on with resume=true")
        if isinstance(error, PermissionError):
            return _complain(f"{error.filename}: permission denied; choose another place or mend its rights")
        raise


def _complain(message: str) -> int:
    print(f"colonnade: {' '.join(message.split())}", file=sys.stderr)
    return 2


def _run(verb: str, plain: list[str], texts: dict[str, str]) -> None:
    import hydra
    from hydra.errors import HydraException
    from omegaconf import DictConfig, OmegaConf, open_dict
    from omegaconf.errors import OmegaConfBaseException

    def task(config: DictConfig) -> None:
        with open_dict(config):
            for field, text in texts.items():
                OmegaConf.update(config, field, arguments.escape(text))
        module: Any = importlib.import_module(f"colonnade.jobs.verbs.{verb}")
        as_json = str(config.output) == "json"
        if str(config.output) not in ("table", "json"):
            raise UserError(f"output={config.output}: unknown; known: table, json")
        result = module.run(config)
        if as_json:
            print(json.dumps(result, allow_nan=False), flush=True)
        else:
            text = module.render(result)
            if text:
                print(text, flush=True)

    os.environ["HYDRA_FULL_ERROR"] = "1"
    sys.argv = [f"colonnade {verb}", *plain]
    try:
        hydra.main(version_base="1.3", config_path="pkg://colonnade.conf", config_name="config")(task)()
    except (HydraException, OmegaConfBaseException) as error:
        raise UserError(arguments.explain(error, _known_fields())) from None


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
