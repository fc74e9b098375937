"""What vLLM loads of ours. Importing this package imports neither vLLM nor torch."""
