"""What the tests of evaluation share."""

from __future__ import annotations

import pytest

from ml4core.models.embedded import embedded_folder
from ml4core.serving.tokenizer import Tokenizer, find_tokenizer


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(find_tokenizer(embedded_folder()))
