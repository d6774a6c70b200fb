"""Benchmarks prefill and decoding of policies on this device, compared with the bandwidth bound: `kvjax bench`.

Models have the shapes of real ones and random weights. Cases are measured one after another in a worker process
(`worker`). A case that fails, hangs or runs out of memory becomes a row that reports it (`runner`, `results`). Several
devices can share the cases.
"""
