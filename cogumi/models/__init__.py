"""Base models: finding, loading and making them; adapters; completions."""
