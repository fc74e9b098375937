"""The state directory: what must outlive the process but is no checkpoint."""
