"""Who says whether an answer keeps to its document: word overlap, a local model of natural language inference, an endpoint."""
