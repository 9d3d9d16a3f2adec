"""Preprocessing: parsed bodies to token ids. Names, chat templates, tools, grammars, adapters not loaded yet."""
