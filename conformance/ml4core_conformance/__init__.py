"""Judges ml4core backends: one oracle, one set of checks, one report, whatever the hardware."""
