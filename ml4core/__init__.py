"""ml4core runs Mistral Large 4 on any accelerator that has a plugin."""

from importlib import import_module
from typing import Any

from ml4core.api.version import API_VERSION

__version__ = "0.1.0"

__all__ = ["API_VERSION", "LLM", "AsyncLLM", "SamplingParams", "__version__"]


def __getattr__(name: str) -> Any:
    """The Python API, imported when it is asked for: this package alone imports no torch."""
    homes = {
        "LLM": "ml4core.serving.llm",
        "AsyncLLM": "ml4core.serving.async_llm",
        "SamplingParams": "ml4core.engine.sampling_params",
    }
    if name not in homes:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(homes[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
