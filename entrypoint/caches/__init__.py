"""What vLLM compiles and tunes for a checkpoint: kept over boots, healed, bounded, shared."""
