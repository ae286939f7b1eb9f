"""Data sets that tasks ask about: public ones by name, and a user's files."""
