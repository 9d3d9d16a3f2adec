"""Structured output: answers that follow a JSON schema, a regular expression, a choice or a grammar."""
