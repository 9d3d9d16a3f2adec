"""What a step, a stream and an adapter cost in one engine, on each device."""
