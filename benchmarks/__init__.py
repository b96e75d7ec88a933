"""Benchmarks: onefold side by side with its peers, in one run. Importing this loads no torch."""
