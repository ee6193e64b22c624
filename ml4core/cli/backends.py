"""``ml4 backends``: every installed backend, whether it can run, and why not."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from ml4core.cli import output

if TYPE_CHECKING:
    from ml4core.registry import BackendReport

COLUMNS = ("NAME", "DISTRIBUTION", "VERSION", "API", "STATE", "DEVICES", "REASONS")


def backends(
    as_json: Annotated[bool, typer.Option("--json", help="A list of objects.")] = False,
) -> None:
    """List the installed backends, their devices, and why one can't run here."""
    from ml4core import registry

    reports = registry.report()
    if as_json:
        output.write_json([report.to_json() for report in reports])
    elif not reports:
        output.note("no backend is installed; pip install ml4core brings cpu")
    else:
        output.write(output.table(COLUMNS, [_row(report) for report in reports], sys.stdout))


def _row(report: BackendReport) -> tuple[str, ...]:
    record, result = report.record, report.result
    return (
        record.name,
        record.distribution,
        record.version,
        "-".join(map(str, record.api)) if record.api else "none",
        result.state,
        "\n".join(devices(report)) or "none",
        "\n".join(str(refusal) for refusal in result.refusals),
    )


def devices(report: BackendReport) -> list[str]:
    """One line a device: its name and architecture, the kind where it isn't real, its memory."""
    lines = []
    for found in report.result.devices:
        device = found.device
        words = [device.name if device.arch in device.name else f"{device.name} ({device.arch})"]
        if device.kind != "real":
            words.append(device.kind)
        if device.memory_bytes:
            words.append(f"{device.memory_bytes / 2**30:.1f} GiB")
        lines.append(", ".join(words))
    return lines
