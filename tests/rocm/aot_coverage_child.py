"""Tells as JSON, by architecture, the jit functions of the backend that no case compiles ahead:
``python aot_coverage_child.py [REGEX]``, where cases whose name has REGEX are left out.

In a process of its own: kernels of an interpreter are not jit functions.
"""

from __future__ import annotations

import ast
import inspect
import json
import pkgutil
import re
import sys
from collections.abc import Iterable, Iterator
from importlib import import_module
from types import ModuleType
from typing import Any, TypeGuard

import ml4core_rocm.kernels
import ml4core_triton.kernels
from ml4core_rocm.aot import launches
from ml4core_rocm.aot_suites import all_cases
from ml4core_rocm.devices import SERVED


def is_jit(value: object) -> TypeGuard[Any]:
    from triton.runtime.jit import JITFunction

    return isinstance(value, JITFunction)


def functions(package: ModuleType) -> dict[str, Any]:
    """Those that the modules of a package define, by their full name."""
    found = {}
    for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
        for name, value in vars(import_module(module.name)).items():
            if is_jit(value) and value.fn.__module__ == module.name:
                found[f"{module.name}.{name}"] = value
    return found


def named_launches(package: ModuleType) -> set[str]:
    """Full names of those that a package launches by their own name, as in ``NAME[grid](..)``."""
    found = set()
    for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
        members = vars(import_module(module.name))
        for call in ast.walk(ast.parse(inspect.getsource(import_module(module.name)))):
            if isinstance(call, ast.Call) and isinstance(call.func, ast.Subscript):
                function = members.get(ast.unparse(call.func.value))
                if is_jit(function):
                    found.add(f"{function.fn.__module__}.{function.fn.__name__}")
    return found


def inlined(function: Any) -> Iterator[Any]:
    """What it calls, by name or by a name of a module."""
    names, known = function.fn.__code__.co_names, function.fn.__globals__
    values = [known[name] for name in names if name in known]
    for value in values:
        members = [getattr(value, name, None) for name in names]
        for one in (value, *(members if isinstance(value, ModuleType) else ())):
            if is_jit(one):
                yield one


def compiled(arch: str, left_out: str) -> Iterator[Any]:
    """What cases launch, and what their launches are given."""
    for case in all_cases():
        if (case.archs and arch not in case.archs) or (left_out and re.search(left_out, case.name)):
            continue
        for launch in launches(case, arch):
            for one in (launch.kernel, *launch.arguments.values()):
                if is_jit(one):
                    yield one


def reached(from_these: Iterable[Any]) -> set[int]:
    found: set[int] = set()
    left = list(from_these)
    while left:
        one = left.pop()
        if id(one) not in found:
            found.add(id(one))
            left += inlined(one)
    return found


def main(left_out: str = "") -> None:
    # A function of the shared package may be there for another backend's kernels.
    shared, own = functions(ml4core_triton.kernels), functions(ml4core_rocm.kernels)
    by_name = named_launches(ml4core_triton.kernels) | named_launches(ml4core_rocm.kernels)
    wanted = {n: one for n, one in shared.items() if n in by_name or n.endswith("_kernel")} | own
    assert by_name <= wanted.keys(), f"{by_name - wanted.keys()}: launched, and in no module"
    told = {}
    for arch in sorted(SERVED):
        launched = list(compiled(arch, left_out))
        covered = reached(launched)
        told[arch] = sorted(name for name, one in wanted.items() if id(one) not in covered)
        others = {one.fn.__name__ for one in launched if not one.fn.__name__.endswith("_kernel")}
        assert not others, f"{others}: kernels that are launched end with _kernel"
    print(json.dumps({"functions": len(wanted), "uncovered": told}))


if __name__ == "__main__":
    main(*sys.argv[1:])
