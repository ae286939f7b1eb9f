"""Judges that decide whether an answer is faithful to its document: word overlap, a local NLI model, or an endpoint."""
