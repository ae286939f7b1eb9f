"""An explorer of attention: the maps of every head on one page that a browser opens from disk."""

from .page import DEFAULT_PROMPT, MOST_TOKENS, Page, maps
