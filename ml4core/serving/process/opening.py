"""What is opened in an engine's process."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ml4core.engine.args import EngineArgs
from ml4core.serving.process.wire import Facts

if TYPE_CHECKING:
    from ml4core.engine.llm import Engine


def open_model(args: EngineArgs) -> tuple[Facts, Engine]:
    """The engine that the flags ask for. Raises as ``open_engine`` does."""
    from ml4core.serving.opening import open_for_any

    opened = open_for_any(args)
    opened.grammars.prepare()  # the first answer of a form is not to hold up all others
    engine = opened.engine
    deployment, core = engine.deployment, engine.core
    longest = deployment.max_model_len
    facts = Facts(
        folder=opened.args.model,
        tokenizer=str(opened.tokenizer.path),
        vocab_size=deployment.model.vocab_size,
        max_model_len=longest,
        max_num_seqs=deployment.max_num_seqs,
        room=core.kv.room(longest - 1) + 1,  # the key of the last token is never needed
        report=engine.report(),
    )
    return facts, engine
