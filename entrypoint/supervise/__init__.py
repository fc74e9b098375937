"""The other way to run vLLM: a small process keeps a standby, and starts server after server."""
