"""OpenAI objects that clients store here: files, batches with their output, responses."""
