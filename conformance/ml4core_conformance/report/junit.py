"""A result as JUnit XML, with what was measured as properties of each case."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree as xml

from ml4core_conformance.check import Status
from ml4core_conformance.results import CheckResult, Result

_FORBIDDEN = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
"""Characters that XML can't hold."""


def write_junit(result: Result, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(to_junit(result))


def to_junit(result: Result) -> bytes:
    """One suite a profile. UNSUPPORTED, WAIVED and what is provisional are skipped, with the
    reason; NOT-RUN is an error, as a skip would look green.
    """
    root = xml.Element("testsuites", name=f"ml4core conformance of {result.column}")
    for profile in dict.fromkeys(each.profile for each in result.results):
        chosen = [each for each in result.results if each.profile == profile]
        suite = _suite(root, profile, chosen, result.created)
        _properties(suite, _facts(result))
        for each in chosen:
            suite.append(_case(each))
    if result.problems:
        suite = _suite(root, "waivers", [], result.created)
        suite.set("tests", str(len(result.problems)))
        suite.set("failures", str(len(result.problems)))
        for problem in result.problems:
            name, _, why = problem.partition(": ")
            case = xml.SubElement(suite, "testcase", classname="waivers", name=_clean(name))
            xml.SubElement(case, "failure", type="Waiver", message=_clean(why)).text = _clean(why)
    xml.indent(root)
    return bytes(xml.tostring(root, "utf-8", xml_declaration=True)) + b"\n"


def _suite(root: xml.Element, name: str, results: list[CheckResult], created: str) -> xml.Element:
    kinds = [_kind(result) for result in results]
    return xml.SubElement(
        root,
        "testsuite",
        name=name,
        timestamp=created,
        tests=str(len(results)),
        failures=str(kinds.count("failure")),
        errors=str(kinds.count("error")),
        skipped=str(kinds.count("skipped")),
        time=f"{sum(result.seconds for result in results):.3f}",
    )


def _facts(result: Result) -> dict[str, str]:
    plugin, device = result.plugin, result.device
    facts = {
        "verdict": result.verdict,
        "complete": str(result.complete).lower(),
        "suite": result.suite,
        "core": result.core,
        "backend": plugin.backend,
        "plugin": f"{plugin.distribution} {plugin.version}".strip(),
        "api": str(result.selection.api),
        "device": device.name,
        "device_kind": device.kind,
        "arch": device.arch,
        "driver": device.driver,
        "capabilities_sha256": result.capabilities.sha256,
        "seeds": " ".join(map(str, result.selection.seeds)),
        "selection": str(result.selection),
    }
    facts |= {f"library.{name}": version for name, version in result.libraries.items()}
    return {name: value for name, value in facts.items() if value}


def _case(result: CheckResult) -> xml.Element:
    name = result.variant or result.id
    case = xml.Element(
        "testcase", classname=result.family, name=_clean(name), time=f"{result.seconds:.3f}"
    )
    facts = {"id": result.id, "status": str(result.status)}
    if result.bugs:
        facts["bugs"] = " ".join(result.bugs)
    if result.waiver:
        facts["waiver"] = result.waiver
    for judged in result.measures:
        facts[f"measure.{judged.what}"] = (
            f"error={judged.error!r} bound={judged.bound!r} ratio={judged.ratio!r} "
            f"where={judged.where}"
        )
    _properties(case, facts)
    if kind := _kind(result):
        status = str(result.status) if result.gates else f"provisional {result.status}"
        first = result.reason.partition("\n")[0]
        attributes = {"message": _clean(first)} | (
            {} if kind == "skipped" else {"type": result.raised or status}
        )
        if kind == "skipped":
            attributes["message"] = _clean(f"{status}: {first}")
        xml.SubElement(case, kind, attributes).text = _clean(result.reason)
    return case


def _kind(result: CheckResult) -> str:
    """The element that says how it ended; empty for one that passed."""
    if result.status is Status.PASS:
        return ""
    if result.status in (Status.UNSUPPORTED, Status.WAIVED) or not result.gates:
        return "skipped"
    return "failure" if result.status is Status.FAIL else "error"


def _properties(parent: xml.Element, facts: dict[str, str]) -> None:
    properties = xml.SubElement(parent, "properties")
    for name, value in facts.items():
        xml.SubElement(properties, "property", name=_clean(name), value=_clean(value))


def _clean(text: str) -> str:
    return _FORBIDDEN.sub("�", text)
