from ml4core_conformance.suite import *  # noqa: F403

ML4_BACKEND = "example"
