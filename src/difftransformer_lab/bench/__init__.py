"""Benchmarks of attention and of whole models: interleaved timings, shown as ratios."""
