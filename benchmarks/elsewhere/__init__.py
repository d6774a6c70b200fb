r"""Programs compiled where there is no GPU, for a machine that has one and too little time: JAX's cache of compiled programs, filled ahead.

    here:   PYTHONPATH=benchmarks/elsewhere/keys:. JAX_PLATFORMS=cpu JAX_COMPILATION_CACHE_DIR=CACHE JAX_SKIP_CUDA_CONSTRAINTS_CHECK=1 \
            python -m benchmarks.elsewhere.compile --gpus 2 kvjax.bench.worker '{"compile_only": true, ...}' < cases
    there:  PYTHONPATH=benchmarks/elsewhere/keys:. JAX_COMPILATION_CACHE_DIR=CACHE python -m kvjax.bench.worker '{...}' < cases

What can only compile runs here as it does there, as if GPUs that are not here were JAX's devices; each program goes into the cache, and none is
read from it. For a program to be found, both sides need the same versions of Python's minor, JAX and its CUDA plugin, this repository at the same
path (kernels' code tells it), the same XLA_FLAGS, of which `--xla_gpu_autotune_level=0 --xla_gpu_enable_triton_gemm=false` must be two (nothing can be
tried here), and keys of the cache that do not tell the machine, which `keys/sitecustomize.py` makes. A decoding program of 32 layers takes 6 seconds on
a core. What cuDNN computes, such as a prompt's attention, is found but does not run: those programs have to be compiled there.
"""
