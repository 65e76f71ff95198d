"""The settings of a workspace. Later sources win: defaults, TOML, ``WORKSPACE_*``, options or keywords."""

import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import attrs

from workspace.errors import ConfigError
from workspace.setting import Bytes, at_least, nearest, setting, structure


@attrs.frozen
class WorkspaceConfig:
    """All settings of one workspace. Immutable; copies and pickles; equal when every setting is.

    Each field's ``metadata`` holds its rule and its description with unit; ``workspace config`` prints them.
    """

    strategy: str = setting("caching", "the name of a strategy", "who places the bytes of a lease", bool)
    allow_unsafe: bool = setting(False, "true or false", "consent to a strategy that does not keep scratch intact")
    micro_batches: int = setting(1, "an integer of at least 1", "slots of a lane that may be live at once", at_least(1))
    policy: Literal["fence,grow", "grow,fence", "fence", "grow"] = setting(
        "fence,grow",
        "'fence,grow', 'grow,fence', 'fence' or 'grow'",
        "what to try, in this order, when no block is ordered; what is not named is refused",
    )
    in_flight: int = setting(
        0,
        "an integer of at least 0",
        "released blocks, not yet ordered, to leave alone (and grow) before one is fenced",
        at_least(0),
    )
    recording: Literal["lazy", "exact"] = setting(
        "lazy", "'lazy' or 'exact'", "record a last use at the acquire that needs it, or at release"
    )
    granularity: Bytes = setting(
        2 << 20,
        "a power of two of at least 512 bytes",
        "slabs are a multiple of it, bytes",
        lambda value: value >= 512 and value & (value - 1) == 0,
    )
    capacity: Bytes | None = setting(
        None, "a size of at least 1 byte, or none", "most that all slabs may hold, bytes", at_least(1, True)
    )
    headroom: float = setting(
        1.0,
        "a number from 1.0 to 16.0",
        "reserve takes this multiple of what was declared",
        lambda value: 1.0 <= value <= 16.0,
    )
    restorable: bool = setting(
        False,
        "true or false",
        "slabs keep their addresses while the workspace sleeps, so that graphs live through it; "
        "they are then no memory of the framework's allocator",
    )
    foreign_captures: Literal["refuse", "query"] = setting(
        "refuse",
        "'refuse' or 'query'",
        "captures the library did not begin: refused, or asked for at each acquire",
    )
    allow_grad: bool = setting(False, "true or false", "lend scratch while autograd records")
    strict_streams: bool = setting(False, "true or false", "count every stream seen at work as a user of a lease")
    poison: bool = setting(False, "true or false", "debugging: fill released bytes with a pattern")
    guard: Bytes = setting(0, "a size of 0 bytes or more", "debugging: band around each lease, bytes", at_least(0))
    trace: Path | None = setting(None, "a path, or none", "file that receives one line per request")
    statistics: bool = setting(False, "true or false", "count requests, fences and growths")
    nvtx: bool = setting(False, "true or false", "an NVTX range around each lease, for Nsight Systems")
    limit: Bytes | None = setting(
        None,
        "a size of at least 1 byte, or none",
        "most that may be on loan at once, bytes",
        at_least(1, True),
    )
    owners: dict[str, str] = setting(
        dict,
        "a table of owner = strategy",
        "strategy of each owner that does not use the common one",
        lambda value: all(value) and all(value.values()),
    )


_NO_SETTINGS = ("WORKSPACE_CONFIG", "WORKSPACE_NATIVE")
"""Variables that name no setting of one workspace: the file, and the process's form of the steady path."""

FIELDS: dict[str, Any] = {field.name: field for field in attrs.fields(WorkspaceConfig)}


@attrs.frozen
class LoadedConfig:
    """A config and, for each setting, where its value comes from (``"default"``, a file, a variable, ...)."""

    config: WorkspaceConfig
    sources: Mapping[str, str]


def load_config(
    file: str | os.PathLike[str] | None = None,
    env: Mapping[str, str] = os.environ,
    overrides: Mapping[str, object] | None = None,
    override_source: str = "keyword argument",
) -> LoadedConfig:
    """Merge the settings of all sources. Whether the strategy exists is for the registry to say.

    Parameters
    ----------
    file
        TOML file; omitted, the path in ``WORKSPACE_CONFIG``, else ``workspace.toml`` of the current directory
        or the ``[tool.workspace]`` table of its ``pyproject.toml``, else none.
    env
        Environment: ``WORKSPACE_STRATEGY`` sets ``strategy``; ``WORKSPACE_OWNERS`` is ``owner=strategy,...``.
    overrides
        Settings by name, of highest precedence.
    override_source
        What `LoadedConfig.sources` says about them.

    Raises
    ------
    ConfigError
        A setting is unknown or its value not allowed, or the file is missing or not TOML.
    """
    chosen = file or env.get("WORKSPACE_CONFIG") or find_file(Path.cwd())
    found: list[tuple[str, str, str, object]] = []  # key, as written, source, value
    if chosen is not None:
        found += [(key, key, str(chosen), value) for key, value in _settings(Path(chosen)).items()]
    for variable in sorted(env):
        if variable.startswith("WORKSPACE_") and variable not in _NO_SETTINGS:
            key = variable.removeprefix("WORKSPACE_").lower()
            found.append((key, variable, f"environment {variable}", env[variable]))
    found += [(key, key, override_source, value) for key, value in (overrides or {}).items()]

    values: dict[str, Any] = {}
    sources = dict.fromkeys(FIELDS, "default")
    for key, written, source, value in found:
        values[key] = structure(_field(key, written, source), value, source)
        sources[key] = source
    return LoadedConfig(WorkspaceConfig(**values), sources)


def find_file(directory: Path) -> Path | None:
    """``workspace.toml`` of a directory, else its ``pyproject.toml`` if that has a ``[tool.workspace]``."""
    own, project = directory / "workspace.toml", directory / "pyproject.toml"
    if own.is_file():
        return own
    return project if project.is_file() and _table(project) else None


def _table(path: Path) -> dict[str, Any]:
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}", "give the path of a TOML file") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not TOML: {error}", "correct the file") from None
    return content.get("tool", {}).get("workspace", {}) if path.name == "pyproject.toml" else content


def _settings(path: Path) -> dict[str, Any]:
    """The settings of a file; a table that is none of them is no misspelt setting, but settings in the wrong place."""
    settings = _table(path)
    for key, value in settings.items():
        if key not in FIELDS and isinstance(value, dict):
            place = "in [tool.workspace] itself" if path.name == "pyproject.toml" else "at the top of the file"
            raise ConfigError(
                f"unknown table {key!r} (from {path})",
                f"write the settings {place}, in no table of their own; only the setting 'owners' is one",
                key=key,
                source=str(path),
                rule="the name of a setting",
            )
    return settings


def _field(key: str, written: str, source: str) -> Any:
    if key in FIELDS:
        return FIELDS[key]
    near = nearest(key, list(FIELDS))
    raise ConfigError(
        f"unknown setting {written!r} (from {source})",
        f"did you mean {near!r}?" if near else f"the settings are: {', '.join(FIELDS)}",
        key=key,
        near=near,
        source=source,
        rule="the name of a setting",
    )
