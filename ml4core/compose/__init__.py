"""Every op and stage as a plain torch composition: what a stage means, and what a new backend
starts from.
"""

import ml4core.compose.pytree  # noqa: F401  # registers Weight, KVCache and StepPlan with torch
