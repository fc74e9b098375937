"""The vLLM that will be exec'd: where it is, and how it reads the user's words."""
