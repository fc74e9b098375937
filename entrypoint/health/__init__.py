"""Whether vLLM serves, and what it is at when it does not."""
