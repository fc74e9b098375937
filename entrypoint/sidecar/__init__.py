"""The daemon beside the servers of a node: it looks, fetches, publishes, scrubs and collects."""
