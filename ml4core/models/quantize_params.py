"""The block of params.json that says how matrices are quantised, in the keys of common tools."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

from ml4core.formats import fp8_block, mxfp4, nvfp4
from ml4core.models.matrix_formats import Matrix
from ml4core.models.quantize_options import QuantizeOptions
from ml4core.models.quantize_plan import Plan
from ml4core.models.quantize_source import PLAIN

KEYS = ("quantization", "quantization_config")
RULE_KEY = "scale_calculation_mode"  # Quark's word
_KEPT_KEYS = ("kv_cache_scheme",)  # says nothing about weights
_FLOAT: Mapping[str, Any] = {"type": "float", "symmetric": True, "dynamic": False}


def stated_rule(config: Mapping[str, Any]) -> str | None:
    """The MXFP4 rule that a block of `config` states, at any depth."""
    for key in KEYS:
        if (rule := _find(config.get(key), RULE_KEY)) is not None:
            return str(rule)
    return None


def _find(value: object, key: str) -> object:
    if isinstance(value, dict):
        if key in value:
            return value[key]
        return next((f for part in value.values() if (f := _find(part, key)) is not None), None)
    if isinstance(value, list):
        return next((f for part in value if (f := _find(part, key)) is not None), None)
    return None


def updated(
    config: Mapping[str, Any], plan: Plan, options: QuantizeOptions, default_key: str
) -> dict[str, Any] | None:
    """`config` with the block of the plan's result; None where nothing changes its format.

    All other keys stand as they are. The block keeps its key, or gets `default_key`; it goes where
    nothing is quantised any more.
    """
    if all(unit.action == "copy" for unit in plan.units):
        return None
    key = next((key for key in KEYS if key in config), default_key)
    result = {name: value for name, value in config.items() if name not in KEYS}
    if (block := _block(plan, options, stated_rule(config))) is not None:
        old = config.get(key)
        kept = {name: old[name] for name in _KEPT_KEYS if isinstance(old, dict) and name in old}
        result[key] = {**block, **kept}
    return result


def _block(plan: Plan, options: QuantizeOptions, source_rule: str | None) -> dict[str, Any] | None:
    rules: dict[str, dict[str, Any]] = {}  # compared by their JSON-able content
    members: dict[str, list[str]] = defaultdict(list)
    plain = set()
    for unit in plan.units:
        if unit.format is None or unit.format in PLAIN:
            plain.add(unit.group.base)
            continue
        rule = options.mxfp4_rule if unit.action == "convert" else source_rule
        if unit.action == "copy" and options.to == "mxfp4":
            rule = rule or options.mxfp4_rule
        group = _scheme(unit.format, _divides(unit.group.matrix, unit.action, options), rule)
        rules.setdefault(repr(group), group)
        members[repr(group)].append(unit.group.base)
    if not members:
        return None
    everything = {base for bases in members.values() for base in bases} | plain
    groups = {
        f"group_{number}": {**rules[key], "targets": _targets(bases, everything)}
        for number, (key, bases) in enumerate(members.items())
    }
    formats = {group["format"] for group in groups.values()}
    return {
        "quant_method": _method(formats),
        "format": formats.pop() if len(formats) == 1 else "mixed-precision",
        "config_groups": groups,
    }


def _divides(matrix: object, action: str, options: QuantizeOptions) -> bool:
    if action == "copy" and isinstance(matrix, Matrix):
        return matrix.divides
    return options.nvfp4_form == "compressed-tensors"


def _scheme(format: str, divides: bool, rule: str | None) -> dict[str, Any]:
    if format == "fp8_block":
        size = [fp8_block.BLOCK, fp8_block.BLOCK]
        weights = {"num_bits": 8, **_FLOAT, "strategy": "block", "block_structure": size}
        return {"format": "float-quantized", "weights": weights}
    if format == "fp8_tensor":
        weights = {"num_bits": 8, **_FLOAT, "strategy": "tensor"}
        return {"format": "float-quantized", "weights": weights}
    if format == "nvfp4":
        weights = {"num_bits": 4, **_FLOAT, "strategy": "tensor_group", "group_size": nvfp4.GROUP}
        return {"format": "nvfp4-pack-quantized" if divides else "nvfp4", "weights": weights}
    weights = {"num_bits": 4, **_FLOAT, "strategy": "group", "group_size": mxfp4.GROUP}
    weights["scale_format"] = "e8m0"
    if rule is not None:
        weights[RULE_KEY] = rule
    return {"format": "mxfp4", "weights": weights}


def _method(formats: Iterable[str]) -> str:
    methods = {"mxfp4": "quark", "nvfp4": "modelopt"}
    return next((methods[name] for name in formats if name in methods), "compressed-tensors")


def _targets(bases: list[str], everything: set[str]) -> list[str]:
    """Patterns over layers and experts where all that match are members, names elsewhere."""
    alike: dict[str, list[str]] = defaultdict(list)
    for base in bases:
        alike[_pattern(base)].append(base)
    total: dict[str, int] = defaultdict(int)
    for base in everything:
        total[_pattern(base)] += 1
    targets: list[str] = []
    for pattern, names in alike.items():
        whole = len(names) > 1 and len(names) == total[pattern]
        targets += [f"re:{pattern}"] if whole else names
    return targets


def _pattern(base: str) -> str:
    return re.sub(r"(?<=\\\.)\d+(?=\\\.)", lambda _: r"\d+", re.escape(base))
