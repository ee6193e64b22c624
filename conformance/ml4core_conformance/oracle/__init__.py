"""The judge: every op and stage in fp64 or as a loop over bytes. Imports ``ml4core.api`` only."""
