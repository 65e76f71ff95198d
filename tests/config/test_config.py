"""Settings: precedence, sources, rules."""

import copy
import pickle
from pathlib import Path

import attrs
import pytest

from workspace.config import FIELDS, WorkspaceConfig, find_file, load_config
from workspace.errors import ConfigError


@pytest.fixture(autouse=True)
def _empty_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_defaults_say_so() -> None:
    """With no source every setting has its default, and its source says so."""
    loaded = load_config(env={})
    assert loaded.config == WorkspaceConfig()
    assert set(loaded.sources.values()) == {"default"} and set(loaded.sources) == set(FIELDS)


def test_later_sources_win() -> None:
    """File beats default, environment beats file, override beats environment; each is remembered."""
    lines = ['strategy = "per_stream"', "in_flight = 1", "micro_batches = 2", 'capacity = "1 GiB"']
    Path("w.toml").write_text("\n".join(lines))
    env = {"WORKSPACE_IN_FLIGHT": "3", "WORKSPACE_MICRO_BATCHES": "4"}
    loaded = load_config("w.toml", env, {"micro_batches": 5}, "command line")
    assert loaded.config == WorkspaceConfig("per_stream", in_flight=3, micro_batches=5, capacity=1 << 30)
    variable = "environment WORKSPACE_IN_FLIGHT"
    wanted = {"capacity": "w.toml", "in_flight": variable, "micro_batches": "command line"}
    assert {key: loaded.sources[key] for key in wanted} == wanted


def test_own_file_beats_project_file(tmp_path: Path) -> None:
    """workspace.toml is used before [tool.workspace], and a project without that table is no source."""
    project = tmp_path / "pyproject.toml"
    project.write_text("[tool.other]\nx = 1\n")
    assert find_file(tmp_path) is None
    project.write_text('[tool.workspace]\nstrategy = "upstream"\n')
    assert load_config(env={}).config.strategy == "upstream"
    (tmp_path / "workspace.toml").write_text('strategy = "planned"\n')
    assert load_config(env={}).config.strategy == "planned"
    assert load_config(env={"WORKSPACE_CONFIG": str(project)}).config.strategy == "upstream"


@pytest.mark.parametrize(
    ("text", "value"),
    [("4096", 4096), ("512K", 512 << 10), ("2 MiB", 2 << 20), ("3gb", 3 << 30), ("none", None)],
)
def test_sizes_have_units(text: str, value: int | None) -> None:
    """A size reads as bytes or with a unit, each a power of 1024."""
    assert load_config(env={"WORKSPACE_LIMIT": text}).config.limit == value


def test_environment_strings_become_values() -> None:
    """Flags, tables and paths are read from environment strings."""
    owners = "draft=caching,main=planned"
    env = {"WORKSPACE_POISON": "on", "WORKSPACE_OWNERS": owners, "WORKSPACE_TRACE": "t.jsonl"}
    config = load_config(env=env).config
    assert config.poison is True and config.trace == Path("t.jsonl")
    assert config.owners == {"draft": "caching", "main": "planned"}


BAD = {
    "strategy": ["", None],
    "allow_unsafe": ["maybe", 2],
    "micro_batches": [0, True, 1.5],
    "in_flight": [-1],
    "recording": ["lasy"],
    "granularity": [0, 3 << 20, "2 parsecs"],
    "capacity": [0, "-1"],
    "headroom": [0.5, float("nan"), "wide"],
    "foreign_captures": ["allow"],
    "guard": [-256],
    "limit": [1.5],
    "trace": ["", 7],
    "owners": [{"draft": 1}, {"": "caching"}, "draft"],
}


@pytest.mark.parametrize(("key", "value"), [(key, value) for key in BAD for value in BAD[key]])
def test_bad_value_is_a_named_error(key: str, value: object) -> None:
    """Key, value, rule and source are in the error, by every way in."""
    with pytest.raises(ConfigError) as direct:
        WorkspaceConfig(**{key: value})  # type: ignore[arg-type]
    with pytest.raises(ConfigError) as loaded:
        load_config(env={}, overrides={key: value})
    assert direct.value.fields["key"] == loaded.value.fields["key"] == key
    assert FIELDS[key].metadata["rule"] in str(direct.value) and direct.value.remedy
    assert "keyword argument" in str(loaded.value)


def test_near_value_is_offered() -> None:
    """A mistyped choice names the nearest one."""
    with pytest.raises(ConfigError, match="did you mean 'lazy'"):
        WorkspaceConfig(recording="lasy")  # type: ignore[arg-type]


@pytest.mark.parametrize("way", ["file", "environment", "override"])
def test_unknown_key_is_a_named_error(way: str) -> None:
    """A typo in a key names the nearest setting, in every source."""
    Path("workspace.toml").write_text("micro_batchs = 2\n" if way == "file" else "")
    env = {"WORKSPACE_MICRO_BATCHS": "2"} if way == "environment" else {}
    with pytest.raises(ConfigError, match="did you mean 'micro_batches'"):
        load_config(env=env, overrides={"micro_batchs": 2} if way == "override" else {})


@pytest.mark.parametrize(
    ("file", "table", "place"),
    [
        ("workspace.toml", "workspace", "at the top of the file"),
        ("workspace.toml", "tool.workspace", "at the top of the file"),
        ("workspace.toml", "owner", "at the top of the file"),
        ("pyproject.toml", "tool.workspace.pool", r"in \[tool.workspace\] itself"),
    ],
)
def test_settings_in_a_table_are_told_their_place(file: str, table: str, place: str) -> None:
    """A table that is no setting is refused with where settings stand; the one setting that is a table is read."""
    Path(file).write_text(f"[{table}]\nin_flight = 2\n")
    with pytest.raises(ConfigError, match=rf"unknown table .*{file}(.|\n)*{place}"):
        load_config(env={})
    Path(file).write_text(f"[{'tool.workspace.' if file == 'pyproject.toml' else ''}owners]\ndraft = 'caching'\n")
    assert load_config(env={}).config.owners == {"draft": "caching"}


@pytest.mark.parametrize("content", ["strategy = ", b"\xff\xfe", None])
def test_unreadable_file_is_a_named_error(content: str | bytes | None) -> None:
    """A file that is missing, not UTF-8 or not TOML is refused by name."""
    if content is not None:
        Path("bad.toml").write_bytes(content.encode() if isinstance(content, str) else content)
    with pytest.raises(ConfigError, match=r"bad\.toml"):
        load_config("bad.toml", env={})


def test_config_copies_and_pickles() -> None:
    """A config survives pickle and deepcopy, and cannot be changed."""
    config = WorkspaceConfig("per_stream", owners={"draft": "caching"}, trace="t.jsonl")  # type: ignore[arg-type]
    assert pickle.loads(pickle.dumps(config)) == copy.deepcopy(config) == config
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        config.strategy = "caching"  # type: ignore[misc]


@pytest.mark.parametrize("field", FIELDS.values(), ids=FIELDS)
def test_every_setting_is_described(field: object) -> None:
    """Each setting has a rule and a one-line description."""
    metadata = field.metadata  # type: ignore[attr-defined]
    assert metadata["rule"] and metadata["about"] and "\n" not in metadata["about"]
