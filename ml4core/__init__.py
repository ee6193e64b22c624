"""ml4core runs Mistral Large 4 on any accelerator that has a plugin."""

from ml4core.api.version import API_VERSION

__version__ = "0.1.0"

__all__ = ["API_VERSION", "__version__"]
