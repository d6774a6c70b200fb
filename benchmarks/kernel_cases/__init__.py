"""What `python -m benchmarks.kernels` checks and times: one module an operation."""
