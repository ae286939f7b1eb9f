"""The page of the demo and the tables of benchmarks."""
