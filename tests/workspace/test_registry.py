"""Strategies by name, from packages and from config; creating a workspace; handles."""

from __future__ import annotations

import copy
import pickle
import re
import warnings
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
import torch

import workspace
from tests.workspace.scene import BYTES, scene, write
from workspace import Handle, WorkspaceConfig, registry
from workspace.errors import ConfigError, DeviceError, UnknownStrategy, UnsafeStrategy, Unsupported, WorkspaceError
from workspace.simulated import Device

MODULE = '''
from workspace.strategies.event_fenced import EventFenced

class Cautious(EventFenced):
    """waits for everything, always

    Second paragraph."""
    name = "cautious"

    def give_back(self, block, stream):
        super().give_back(block, stream)
        self.timeline.synchronize()

class Reckless(EventFenced):
    """hands anything out"""
    name = "reckless"
    safe = False

class Blank(EventFenced):
    """   """
    name = "blank"

class Silent:
    """says nothing"""
    name = "silent"
    def __init__(self, timeline, config): pass

class Vague(Silent):
    """says neither yes nor no"""
    name = "vague"
    safe = "yes"

class Renamed(EventFenced):
    """has another name"""
    name = "something"

class Partial(Silent):
    """has one method"""
    name, safe, lends_tensors = "partial", True, True
    def place(self, request, stream): return None

class Raising(EventFenced):
    """cannot be made"""
    name = "raising"
    def __init__(self, timeline, config): raise RuntimeError("no licence")

class Refusing(EventFenced):
    """refuses by a typed error of its own"""
    name = "refusing"
    def __init__(self, timeline, config):
        from workspace.errors import Unsupported
        raise Unsupported("needs more")

def made(timeline, config):
    """a function"""
    return EventFenced(timeline, config)

NUMBER = 3
'''
BROKEN = {
    "broken": ("third_party_nowhere:Nothing", "cannot be imported: ModuleNotFoundError: No module named"),
    "gone": ("third_party_strategies:Gone", "cannot be imported: AttributeError"),
    "silent": ("third_party_strategies:Silent", "has no `safe`"),
    "vague": ("third_party_strategies:Vague", "has no `safe`"),
    "made": ("third_party_strategies:made", "has no `safe`"),
    "number": ("third_party_strategies:NUMBER", "is not callable"),
    "renamed": ("third_party_strategies:Renamed", "has `name` 'something'"),
}
"""Entry point and what is wrong with it, as it is listed."""
UNMADE = {
    "partial": ("third_party_strategies:Partial", "it has no abandon, close, "),
    "raising": ("third_party_strategies:Raising", "raises RuntimeError when it is made: no licence"),
}
"""What only shows when one is made."""


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package on the path that registers strategies, most of them broken and one under a name that is taken."""
    (tmp_path / "third_party_strategies.py").write_text(MODULE)
    information = tmp_path / "third_party-1.0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: third-party\nVersion: 1.0\n")
    (information / "entry_points.txt").write_text(
        "[workspace.strategies]\ncautious = third_party_strategies:Cautious\n"
        "reckless = third_party_strategies:Reckless\nblank = third_party_strategies:Blank\n"
        "refusing = third_party_strategies:Refusing\n"
        + "".join(f"{name} = {value}\n" for name, (value, _) in (BROKEN | UNMADE).items())
        + "caching = third_party_strategies:Reckless\n"
        "[workspace.workloads]\nbroken = third_party_nowhere:Nothing\nmine = third_party_strategies:Reckless\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))


def test_the_built_in_strategies() -> None:
    """Each has a line, and says whether it is safe."""
    found = registry.strategies()
    assert {name: entry.safe for name, entry in found.items() if name in BUILT_IN} == BUILT_IN
    assert all(entry.summary and "\n" not in entry.summary for entry in found.values())
    for name in BUILT_IN:
        _, ws = scene(name, allow_unsafe=True)
        assert ws.strategy == name == ws.strategy_object.name and ws.strategy_object.safe == BUILT_IN[name]
        assert isinstance(ws.provider, workspace.WorkspaceProvider) and name in repr(ws)


def test_every_exported_name_stays_what_it_was_after_a_strategy_was_loaded() -> None:
    """No subpackage replaces one of them."""
    before = {name: getattr(workspace, name) for name in workspace.__all__}
    scene("event_fenced")
    assert {name: getattr(workspace, name) for name in workspace.__all__} == before


BUILT_IN = {"caching": True, "event_fenced": True, "per_stream": True, "upstream": False, "unfenced": False}


def test_an_unknown_strategy_names_the_nearest() -> None:
    """And lists what there is."""
    with pytest.raises(UnknownStrategy, match="did you mean 'event_fenced'") as caught:
        scene("event_fence")
    assert "per_stream" in str(caught.value) and isinstance(caught.value, ConfigError)
    with pytest.raises(UnknownStrategy, match="there are: "):
        scene("zzzzzz")


@pytest.mark.parametrize("name", ["upstream", "unfenced"])
def test_an_unsafe_strategy_needs_consent(name: str) -> None:
    """For the workspace and for an owner."""
    with pytest.raises(UnsafeStrategy, match="allow_unsafe=true"):
        scene(name)
    with pytest.raises(UnsafeStrategy, match=name):
        scene("event_fenced", owners={"one": name})
    _, ws = scene("event_fenced", owners={"one": name}, allow_unsafe=True)
    assert ws.owner("one").strategy == name


def test_a_package_adds_a_strategy(installed: None) -> None:
    """Listed with its docstring's first line, chosen by name, composed with adaptors as any other."""
    entry = registry.strategies()["cautious"]
    assert (entry.summary, entry.safe) == ("waits for everything, always", True)
    device, ws = scene("cautious", statistics=True)
    write(device, ws, "one", 4096, ws.stream("one"))
    write(device, ws, "two", 4096, ws.stream("two"))
    assert ws.strategy == "cautious" and device.verdict() == "SAFE" and ws.snapshot().fences == 0
    with pytest.raises(UnsafeStrategy, match="hands anything out"):
        scene("reckless")


def test_a_broken_package_breaks_only_its_own_strategy(installed: None) -> None:
    """It is listed with what is wrong, and claims no safety; the others can be chosen, a typo is still a typo."""
    found = registry.strategies()
    for name, (_, wrong) in BROKEN.items():
        assert wrong in found[name].unusable == found[name].summary and not found[name].safe
    assert {name for name, entry in found.items() if entry.unusable} == BROKEN.keys()
    for name in ("event_fenced", "cautious", "blank"):
        scene(name)
    assert found["blank"].summary == "third_party_strategies:Blank"
    with pytest.raises(UnknownStrategy, match="did you mean 'cautious'"):
        scene("cautios")
    assert "broken" in registry.workloads()
    assert registry.workloads()["mine"] is not None


@pytest.mark.parametrize("name", [*BROKEN, *UNMADE])
def test_a_broken_strategy_is_refused_when_it_is_chosen(installed: None, name: str) -> None:
    """By a typed error that names the entry point, the rule and a remedy; for a workspace and for an owner."""
    value, wrong = (BROKEN | UNMADE)[name]
    for choose in (lambda: scene(name), lambda: scene("event_fenced", owners={"one": name})[1].owner("one")):
        with pytest.raises(ConfigError, match=re.escape(wrong)) as caught:
            choose()
        assert f"'{name} = {value}' of third-party" in caught.value.problem and "uninstall" in caught.value.remedy


def test_a_strategy_may_refuse_by_an_error_of_its_own(installed: None) -> None:
    """It is passed on as it is."""
    with pytest.raises(Unsupported, match="needs more"):
        scene("refusing")


def test_a_package_does_not_replace_a_built_in_strategy(installed: None) -> None:
    """The name means what it always did."""
    assert registry.strategies()["caching"].safe and scene("caching")[1].strategy == "caching"
    (line,) = registry.overlooked()
    assert "'caching = third_party_strategies:Reckless' of third-party is not used" in line and "built-in" in line


def test_whoever_chooses_a_name_that_two_register_is_warned(installed: None) -> None:
    """Once; and nobody is who chooses another."""
    registry._warn_of_overlooked.cache_clear()
    with pytest.warns(RuntimeWarning, match=r"caching = third_party_strategies:Reckless.*not used.*another name"):
        scene("caching")
    with warnings.catch_warnings(action="error"):
        scene("caching")
        scene("event_fenced")
        scene("cautious")


def test_of_two_packages_with_one_name_the_second_is_said_to_be_overlooked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever comes first on the path counts."""
    points = [EntryPoint("mine", f"package_{one}:Mine", "workspace.strategies") for one in "ab"]
    monkeypatch.setattr("workspace.registry.entry_points", lambda group: points)
    (line,) = registry.overlooked()
    assert "package_b:Mine' is not used: 'mine' is entry point 'mine = package_a:Mine'" in line
    registry._warn_of_overlooked.cache_clear()
    with pytest.warns(RuntimeWarning, match="package_b:Mine"), pytest.raises(ConfigError, match="package_a:Mine"):
        registry.strategy("mine")


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"stratgy": "caching"}, "did you mean 'strategy'"),
        ({"micro_batches": 0}, "micro_batches"),
        ({"granularity": 1000}, "granularity"),
        ({"headroom": 0.5}, "headroom"),
        ({"recording": "sometimes"}, "recording"),
        ({"capacity": -1}, "capacity"),
    ],
)
def test_bad_settings_are_refused_by_name(settings: dict[str, Any], text: str) -> None:
    """Given as keywords, or on top of a config."""
    with pytest.raises(ConfigError, match=text):
        scene(**settings)
    with pytest.raises(ConfigError, match=text):
        workspace.create(config=WorkspaceConfig(), **settings)


def test_keywords_win_over_a_config() -> None:
    """And the config given is not changed."""
    config = WorkspaceConfig(strategy="per_stream", micro_batches=2)
    ws = workspace.create(config=config, device=Device(memory="virtual"), micro_batches=3)
    assert (ws.strategy, ws.config.micro_batches, config.micro_batches) == ("per_stream", 3, 2)


@pytest.mark.parametrize("device", ["cpu", torch.device("cpu")])
def test_the_cpu_is_one_device(device: Any) -> None:
    """Workspaces on it share their timeline, and give CPU tensors."""
    one, two = workspace.create("event_fenced", device=device), workspace.create("per_stream", device="cpu")
    assert one.timeline is two.timeline and one.device == torch.device("cpu")
    with one.lease(BYTES, N=4) as lease:
        assert lease.x.device == torch.device("cpu")


@pytest.mark.parametrize("device", ["tpu", "mps", "cpu:x", None, 3.5, object()])
def test_another_device_is_refused(device: Any) -> None:
    """With what may be passed instead."""
    with pytest.raises(DeviceError, match="cpu"):
        workspace.create("event_fenced", device=device)


def test_a_driver_may_be_passed() -> None:
    """The seam itself is a device too."""
    device = Device(memory="virtual")
    ws = workspace.create("event_fenced", device=device.driver())
    assert ws.driver is device.driver() and ws.timeline is workspace.create("caching", device=device).timeline


# -- handles -------------------------------------------------------------------------------------------------


class Module(torch.nn.Module):
    def __init__(self, handle: Handle) -> None:
        super().__init__()
        self.workspace = handle


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))])
@pytest.mark.parametrize("used", [False, True])
def test_a_module_with_a_handle_is_copied(copied: Any, used: bool) -> None:
    """The copy resolves to the process's workspace of the same config and device."""
    module = Module(Handle(WorkspaceConfig(strategy="per_stream", headroom=1.25)))
    if used:
        module.workspace()
    twin = copied(module)
    assert twin.workspace() is module.workspace() and twin.workspace().strategy == "per_stream"


def test_handles_of_different_configs_are_different_workspaces() -> None:
    """One for each config and device."""
    one, two = Handle(WorkspaceConfig(strategy="per_stream")), Handle(WorkspaceConfig(strategy="event_fenced"))
    assert one() is not two() and one() is Handle(WorkspaceConfig(strategy="per_stream"))()


def test_a_handle_whose_workspace_was_closed_resolves_anew() -> None:
    """Whoever closed it, the module's next forward gets one that works."""
    handle = Handle(WorkspaceConfig(strategy="event_fenced", headroom=1.5))
    handle().close()
    with handle().lease(BYTES, N=4) as lease:
        assert lease.x.shape == (4,)


def test_configs_are_copied_and_errors_too() -> None:
    """Both cross process borders; an error keeps its type, text and fields."""
    config = WorkspaceConfig(strategy="per_stream", owners={"a": "caching"})
    assert pickle.loads(pickle.dumps(config)) == copy.deepcopy(config) == config
    error = UnknownStrategy("strategy 'x' is not known", "there are: y", name="x")
    twin = pickle.loads(pickle.dumps(error))
    assert type(twin) is UnknownStrategy and str(twin) == str(error) and twin.fields == {"name": "x"}
    assert isinstance(twin, WorkspaceError)
