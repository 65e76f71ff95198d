"""``workspace.create``: from settings and a device to a workspace."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import attrs
import torch

from workspace import native
from workspace.adaptors.compose import compose
from workspace.config import WorkspaceConfig, load_config
from workspace.driver import Driver
from workspace.errors import ConfigError, DeviceError, UnsafeStrategy
from workspace.ranged import check_ranges
from workspace.registry import strategy as find_strategy
from workspace.timeline import Timeline, timeline_of
from workspace.workspace import Workspace

_CPU: list[Any] = []
"""The device behind ``"cpu"``, one for each process."""

if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_CPU.clear)


def create(
    strategy: str | None = None, *, device: Any = "cpu", config: WorkspaceConfig | None = None, **settings: Any
) -> Workspace:
    """Create a workspace.

    Parameters
    ----------
    strategy
        Name of a strategy; omitted, as configured.
    device
        ``"cpu"``, ``"cuda"`` or ``"cuda:1"``, a `torch.device`, a `workspace.simulated.Device`, or a driver. Workspaces
        of one device share its streams, clocks and lock.
    config
        All settings at once; omitted, TOML and environment are read (see `load_config`).
    **settings
        Single settings, of highest precedence.

    Raises
    ------
    ConfigError, UnknownStrategy
        A setting or the strategy's name is not known, or a value not allowed; ``WORKSPACE_NATIVE`` is no form there is.
    UnsafeStrategy
        The strategy keeps nothing intact and ``allow_unsafe`` is off.
    DeviceError
        There is no such device.

    Examples
    --------
    >>> create("event_fenced").strategy
    'event_fenced'
    """
    native.check()
    if strategy is not None:
        settings["strategy"] = strategy
    if config is None:
        config = load_config(overrides=settings).config
    elif not isinstance(config, WorkspaceConfig):
        raise ConfigError(
            f"config={config!r} is not a WorkspaceConfig", "pass settings as keywords, or WorkspaceConfig(**settings)"
        )
    elif settings:
        load_config(env={}, overrides=settings)
        config = attrs.evolve(config, **settings)
    driver = _driver(device)
    check_ranges(config, driver)
    timeline = timeline_of(driver)
    timeline.query_captures = timeline.query_captures or config.foreign_captures == "query"
    timeline.refresh()
    return _build(timeline, config, device if hasattr(device, "driver") else timeline.driver.device)


def _build(timeline: Timeline, config: WorkspaceConfig, device: Any) -> Workspace:
    for name in config.owners.values():
        _permitted(name, config)

    def child(owner: str, root: Workspace) -> Workspace:
        name, own = root.owned(owner), root.config  # an owner may have owners
        strategy = own.owners.get(owner, own.strategy)
        if strategy != own.strategy:
            return _workspace(timeline, attrs.evolve(own, strategy=strategy), device, child, name)
        return Workspace(timeline, root.strategy_object, root.provider, own, device, child, name, root)

    return _workspace(timeline, config, device, child, "")


def _workspace(
    timeline: Timeline,
    config: WorkspaceConfig,
    device: Any,
    child: Callable[[str, Workspace], Workspace],
    name: str,
) -> Workspace:
    _permitted(config.strategy, config)
    factory = find_strategy(config.strategy).load()
    with timeline.lock:
        strategy = factory(timeline, config)
        return Workspace(timeline, strategy, compose(strategy, timeline, config), config, device, child, name)


def _permitted(name: str, config: WorkspaceConfig) -> None:
    entry = find_strategy(name)
    if not entry.safe and not config.allow_unsafe:
        raise UnsafeStrategy(
            f"strategy {name!r} does not keep scratch intact ({entry.summary})",
            "set allow_unsafe=true to use it as a baseline, or choose a safe strategy",
            name=name,
        )


def _driver(device: Any) -> Driver:
    if hasattr(device, "driver"):
        found: Driver = device.driver()
        return found
    if hasattr(device, "capture_of"):
        found = device
        return found
    try:
        named = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise DeviceError(
            f"device {device!r} is not known", "pass 'cpu', 'cuda', 'cuda:1' or a simulated.Device"
        ) from error
    if named.type == "cpu":
        if not _CPU:
            from workspace.simulated import Device

            _CPU.append(Device(memory="host", execution="immediate", log=False))
        found = _CPU[0].driver()
        return found
    if named.type == "cuda":
        from workspace.cuda import cuda_driver

        return cuda_driver(named)
    raise DeviceError(f"device {device!r} is not supported", "use 'cuda' (NVIDIA) or 'cpu'; ROCm is not supported")
