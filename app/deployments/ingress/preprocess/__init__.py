"""From a parsed body to token ids: names, chat templates, tools, grammars, adapters that are not loaded yet."""
