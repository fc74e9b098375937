"""Where checkpoints live: reading them, building them in staging, committing, copying."""
