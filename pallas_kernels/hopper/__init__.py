"""Kernels that run on Hopper GPUs only, in Pallas' Mosaic GPU dialect.

- `fused_decode_block/`: an operation with its public function and reference.
- `block_attention.py`, `nearest.py` and `attention_mass.py`: kernels of operations in the folders `prefill_attention/`,
  `kmeans/` and `window_scores/`. These folders have the public functions, the XLA references and the kernels for other
  devices.
- `prompt_attention.py`: attention over a whole prompt by the kernel of `block_attention.py`.
- `wgmma.py`: helpers that the kernels share.
"""
