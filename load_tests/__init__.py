"""Programs that measure: the engine, the kernels, and any OpenAI endpoint under load."""
