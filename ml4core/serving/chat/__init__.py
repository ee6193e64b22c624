"""Chats of the OpenAI API: to token ids, and from token ids to answers. Needs no HTTP."""

from ml4core.serving.chat.prompt import ChatPrompt, ChatTemplate
from ml4core.serving.chat.stream import AnswerStream, Delta, Message, ToolCall, ToolCallDelta

__all__ = [
    "AnswerStream",
    "ChatPrompt",
    "ChatTemplate",
    "Delta",
    "Message",
    "ToolCall",
    "ToolCallDelta",
]
