"""Has JAX's cache of compiled programs tell programs apart, but not the machines that they are compiled on."""

import importlib
from typing import Any


def _forget_the_machine() -> None:
    jax: Any = importlib.import_module("jax")
    keys: Any = importlib.import_module("jax._src.cache_key")
    of_options = keys._hash_serialized_compile_options
    keys._hash_platform = lambda key, backend: keys._hash_string(key, backend.platform)
    keys._hash_accelerator_config = lambda key, devices: keys._hash_string(
        key, f"{devices.size} {devices.flat[0].device_kind}"
    )
    keys._hash_serialized_compile_options = lambda key, options, strip_device_assignment=False: of_options(
        key, options, True
    )
    jax.config.update("jax_persistent_cache_enable_xla_caches", "none")
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


_forget_the_machine()
