"""The benchmarks behind ``tierstore bench``; they use public names only."""
