"""Completions of held-out prompts by several models, their scores, and whether a difference is more than chance."""
