"""The demo: three small models learn noisy recall side by side, in the terminal and on a page."""
