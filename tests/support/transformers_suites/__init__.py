"""transformers' own test suites of the installed release, taken from its source distribution and never kept here."""
