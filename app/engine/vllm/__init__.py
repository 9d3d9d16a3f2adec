"""vLLM as the engine: its process, its adapter slots, and the scheduler in front of it."""
