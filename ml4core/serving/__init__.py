"""Text in, text out: the tokenizer, and the server that is built on it."""
