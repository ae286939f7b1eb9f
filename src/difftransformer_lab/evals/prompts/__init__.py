"""From texts, demonstrations and chat templates to prompts in tokens."""
