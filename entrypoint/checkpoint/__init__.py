"""What a checkpoint is: its key, its layout, its manifest; looking at one on disk."""
