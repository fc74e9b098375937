"""The source: where it lies, which model it is, and its non-weight files."""
