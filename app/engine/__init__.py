"""Requests in, tokens out: the engine, without Ray and without HTTP."""
