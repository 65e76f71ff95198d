"""The JSON report of a sweep, with what is needed to make it again."""

from __future__ import annotations

import datetime
import platform
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs
import orjson
import torch

from workspace.config import load_config
from workspace.errors import ConfigError
from workspace.sweep.plan import Extent, Replay
from workspace.sweep.result import Refused, Result, host_ratios

SCHEMA = 1
"""Raised when a field of the report changes its meaning or goes away."""


def commit_of(directory: Path) -> str | None:
    """The commit a directory is checked out from, ``-dirty`` when changed; None outside a checkout."""
    command = ["git", "-C", str(directory), "describe", "--always", "--abbrev=40", "--dirty", "--exclude=*"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None  # an installed copy without git or its history
    return found.stdout.strip()


def provenance() -> dict[str, Any]:
    """Where and when a measurement was made."""
    return {
        "commit": commit_of(Path(__file__).parent),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "machine": platform.machine(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
    }


def report(
    replay: Replay, description: str, extent: Extent, computed: str, results: Sequence[Result | Refused]
) -> dict[str, Any]:
    """Everything a sweep measured, as plain JSON values.

    Parameters
    ----------
    description, computed
        Of the session, and of the configuration that computed real numbers (empty if none did).
    extent
        Of the steps that were replayed.
    """
    ratios = host_ratios([result for result in results if isinstance(result, Result)])
    cells = []
    for result in results:
        entry = attrs.asdict(result)
        if isinstance(result, Result):
            entry["host_over_caching"] = ratios.get(result.cell)
        cells.append(entry)
    return {
        "schema": SCHEMA,
        "made": provenance(),
        "replay": attrs.asdict(replay),
        "session": description,
        "replayed": attrs.asdict(extent),
        "computed": computed,
        "config": _settings(),
        "cells": cells,
    }


def _settings() -> dict[str, Any]:
    """The settings of every cell; what differs from cell to cell stands there."""
    by_cell = ("strategy", "allow_unsafe", "micro_batches", "statistics")
    settings = attrs.asdict(load_config().config)
    return {name: value for name, value in settings.items() if name not in by_cell}


def make_folder(out: Path) -> None:
    """Before anything is measured: raises `ConfigError` where the report could not be written."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        probe = tempfile.TemporaryFile(dir=out)
    except OSError as error:
        raise ConfigError(f"--out {out} cannot be written to: {error.strerror}", "name a folder") from error
    probe.close()


def write_json(content: dict[str, Any], path: Path) -> None:
    """Write indented JSON; paths become strings."""
    path.write_bytes(orjson.dumps(content, default=str, option=orjson.OPT_INDENT_2) + b"\n")
