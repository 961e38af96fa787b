"""`predict`: what a trained run says of new input."""

from __future__ import annotations

import os
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
from omegaconf import DictConfig

from ...ensemble import model as models
from ...kernels.errors import UserError
from .. import fields, rundir, stages, windows
from .. import plan as plans
from .. import settings as settings_module

_MOST_SAMPLED = 100_000


def run(config: DictConfig) -> dict[str, Any]:
    """Bits of a file's bytes, classes of a matrix's rows, or a text continued."""
    run_directory = rundir.require(config)
    file = fields.text(config, "input")
    prompt = fields.text(config, "prompt")
    count = fields.number(config, "sample", int)
    if not 0 <= count <= _MOST_SAMPLED:
        raise UserError(f"sample={count}: must be between 0 and {_MOST_SAMPLED:,} bytes")
    if file is None and prompt is None and not count:
        raise UserError(
            "input: not given; name a file to score (input=FILE), or continue a text (prompt=... sample=200)"
        )
    if file is not None and (prompt is not None or count):
        raise UserError("input and prompt: give one of them; input=FILE scores, prompt=... sample=200 continues")
    if prompt is not None and not count:
        raise UserError("sample: not given; say how many bytes to add to the prompt, as in sample=200")
    seed = fields.number(config, "seed", int)
    if not 0 <= seed < 1 << 64:
        raise UserError(f"seed={seed}: must be between 0 and 2**64 - 1")
    stored = settings_module.read(rundir.merged(run_directory, config, own=("seed",)))
    if stored.family == "lstm":
        if file is None:
            raise UserError("prompt and sample: experts over windows score texts; give one with input=FILE")
        return _score_windows(run_directory, stored, _existing(file))
    model = models.load(run_directory, stages.own_module(stored))
    if file is None:
        start = os.fsencode(prompt or "")
        temperature = fields.number(config, "temperature", float)
        added = model.sample(start, count, seed, temperature)
        return {"prompt": prompt or "", "text": added.decode("utf-8", "replace"), "items": count}
    path = _existing(file)
    return _score_text(model, path) if model.is_text else _score_rows(model, path)


def _existing(file: str) -> Path:
    path = Path(file).expanduser()
    if not path.is_file():
        raise UserError(f"input={file}: no such file; name one")
    return path


def _score_text(model: models.EnsembleModel, path: Path) -> dict[str, Any]:
    content = path.read_bytes()
    if not content:
        raise UserError(f"input={path}: is empty; give a file with bytes in it")
    return _scored(model.text_bits(content), content)


def _score_windows(run_directory: Path, settings: settings_module.Settings, path: Path) -> dict[str, Any]:
    content, prefix = path.read_bytes(), settings.windows().prefix
    if len(content) <= prefix:
        raise UserError(
            f"input={path}: has {len(content)} bytes; the first {prefix} only say which experts to ask, give more"
        )
    plan = plans.load(run_directory)
    markers = stages.markers_or_complain(run_directory, run_directory, plan)
    model = windows.open_model(run_directory, settings, plan, markers)
    return _scored(model.text_bits(content), content[prefix:])


def _scored(bits: np.ndarray, content: bytes) -> dict[str, Any]:
    return {
        "bits_per_byte": float(bits.mean()),
        "items": len(bits),
        "total_bits": float(bits.sum()),
        "bits": [round(float(value), 4) for value in bits],
        "bytes": list(content),
    }


def _score_rows(model: models.EnsembleModel, path: Path) -> dict[str, Any]:
    try:
        with np.load(path, allow_pickle=False) as archive:
            x = archive["x"]
            y = archive["y"] if "y" in archive.files else None
    except (OSError, ValueError, KeyError, TypeError, IndexError, zipfile.BadZipFile) as error:
        raise UserError(f"input={path}: needs an .npz file with an array x [n, features] ({error})") from None
    if x.dtype.kind not in "fiub" or not np.isfinite(x.astype(np.float64)).all():
        raise UserError(f"input={path}: x must hold finite numbers; clean it")
    if model.mixing.head == "regression":
        values = model.predict_values(x)
        found: dict[str, Any] = {"items": len(x), "values": values.tolist(), "bits_per_byte": None}
        if y is not None and len(x):
            found["rmse"] = float(np.sqrt(((values - y) ** 2).mean()))
        return found
    log_proba = model.predict_log_proba(x)
    classes = log_proba.argmax(1)
    result: dict[str, Any] = {"items": len(x), "classes": classes.tolist(), "bits_per_byte": None}
    if y is not None:
        result["accuracy"] = float((classes == y).mean()) if len(x) else None
    return result


def render(result: dict[str, Any]) -> str:
    """Per-byte bits as columns, the continued text, or a class a line."""
    if "text" in result:
        return result["prompt"] + result["text"]
    if "values" in result:
        return "\n".join(f"{value:.6g}" for value in result["values"])
    if "classes" in result:
        return "\n".join(str(label) for label in result["classes"])
    rows = [
        f"{offset:>8}  {_shown(byte):<6}{bits:>9.4f}"
        for offset, (byte, bits) in enumerate(zip(result["bytes"], result["bits"], strict=True))
    ]
    head = f"{'offset':>8}  {'byte':<6}{'bits':>9}"
    return "\n".join([head, *rows, f"{result['bits_per_byte']:.4f} bits/byte over {result['items']:,} bytes"])


def _shown(byte: int) -> str:
    return repr(chr(byte)) if 32 <= byte < 127 else f"0x{byte:02x}"
