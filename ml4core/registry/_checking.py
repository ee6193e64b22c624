"""Gathers every reason against a deployment, and tells plugins of a fault."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator

import pluggy

from ml4core.api import Capabilities, Deployment, Fault, Refusal, Refused, undeclared
from ml4core.registry._text import describe, one_line

_logger = logging.getLogger(__name__)


def check(
    deployment: Deployment,
    capabilities: Capabilities,
    manager: pluggy.PluginManager,
    found: Iterable[Refusal] = (),
) -> None:
    """Raise one ``Refused`` with every reason against the deployment; return if there is none.
    ``found`` are reasons that the caller has already.

    The reasons are the needed words that the backend does not declare, and whatever the plugins of
    ``manager`` answer. They depend on the arguments alone, so each rank finds the same list. Runs
    before any collective and any allocation.
    """
    refusals = [*found]
    refusals += undeclared(deployment.needs, capabilities, "core")
    refusals += _plugins_refusals(deployment, capabilities, manager)
    if refusals:
        raise Refused(refusals)


def notify_fault(fault: Fault, manager: pluggy.PluginManager) -> None:
    """Tell each plugin of ``manager`` once. What one raises is logged, and changes nothing."""
    for name, hook in _each_plugin(manager, "ml4core_fault"):
        try:
            hook(fault=fault)
        except (Exception, SystemExit) as error:
            _logger.error("plugin %s failed in ml4core_fault: %s", name, describe(error))


def _plugins_refusals(
    deployment: Deployment, capabilities: Capabilities, manager: pluggy.PluginManager
) -> Iterator[Refusal]:
    for name, hook in _each_plugin(manager, "ml4core_refusals"):
        try:
            answers = hook(deployment=deployment, capabilities=capabilities)
            refusals = [refusal for answer in answers for refusal in answer]
        except (Exception, SystemExit) as error:
            reason = f"it can't say whether it serves this deployment: {describe(error)}"
            yield Refusal(name, "ml4core_refusals", reason)
            continue
        for refusal in refusals:
            if isinstance(refusal, Refusal):
                yield refusal
            else:
                reason = f"it answered {one_line(repr(refusal))}, which is no Refusal"
                yield Refusal(name, "ml4core_refusals", reason)


def _each_plugin(
    manager: pluggy.PluginManager, hook: str
) -> Iterable[tuple[str, pluggy.HookCaller]]:
    """One caller for each plugin, so that the failure of one hides the answer of no other."""
    plugins = dict(manager.list_name_plugin())
    for name in sorted(plugins):
        others = [plugin for other, plugin in plugins.items() if other != name]
        yield name, manager.subset_hook_caller(hook, remove_plugins=others)
