"""`load`: one function for every kind of checkpoint."""

import dataclasses
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from kvjax._util import files
from kvjax._util.arguments import short, shown
from kvjax._util.user_files import expanded
from kvjax.models.params import Params
from kvjax.models.sharding import get_mesh, get_shard, place, place_from

from . import default_model, hub
from .checkpoint import FLOATS, Checkpoint, assemble, check_kinds, kinds_of
from .errors import CheckpointError
from .gguf_file import find_gguf, open_gguf
from .huggingface import PICKLES, open_directory, refuse_pickle
from .orbax_directory import MARK, open_orbax
from .text_files import present
from .tokenizer_source import TokenizerSource, find_tokenizer


def load(
    source: str | Path | None = None,
    *,
    dtype: Any = None,
    weights: str | None = None,
    embedding: str | None = None,
    tokenizer: TokenizerSource | None = None,
    device: Any = None,
    revision: str | None = None,
    token: str | bool | None = None,
    progress: bool | None = None,
    mesh: Mesh | str | None = None,
) -> Params:
    """Load a model, its tensors streaming from the file to the device one at a time.

    Args:
        source: a Hugging Face directory or hub id (``owner/name``), a GGUF file (of a split model the first file), a directory that `convert` or `save` wrote, or
            None or "SmolLM2-135M-Instruct" (in any case) for the default model.
        dtype: type of the parameters, and of activations and cache, float32, bfloat16 or float16. By default float32 on CPU and the checkpoint's own
            elsewhere (bfloat16 for quantised ones).
        weights: how matrices of the layers are held: "float"; "int8", symmetric with a scale per output; "int4", in groups of 32 with a
            scale and a minimum, but for what a file has in 4 bits already; or "as stored", which keeps GGUF blocks (Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q2_K to Q6_K, IQ4_NL, IQ4_XS), GPTQ, AWQ, compressed-tensors and what
            `convert` wrote in 8 or 4 bits without loss. By default floats from a GGUF file, else as stored.
        embedding: the same of embedding and head; by default "as stored" if `weights` is, else "float".
        tokenizer: used in place of the checkpoint's own: a directory with a ``tokenizer.json``, a GGUF file, a hub id, or a
            `kvjax.conversion.Tokenizer`. End tokens stay those of the model.
        device: a jax device or sharding to put the parameters on, or text: a platform, such as "cpu", "gpu", "cuda" or "tpu", and perhaps which of
            its devices, such as "gpu:1". None is jax's default device. Programs run on the default device: to compute elsewhere, also set
            `jax.config.update("jax_default_device", ...)`, or JAX_PLATFORMS.
        revision: branch, tag or commit of a model on the hub; None is its main branch.
        token: for models on the hub that are not open to all. None takes the one that ``HF_TOKEN`` or ``hf auth login`` gives,
            False none.
        progress: draw progress bars; None draws them if the error stream is a terminal.
        mesh: devices to share the parameters, as for `kvjax.Engine`, in place of `device`; whatever they are given to runs there. Each process reads
            only what its own devices are to have.

    Warns of weights that are NaN or infinite, of tokens that the model does not know, and of a head that differs from the embedding to which the
    configuration ties it.

    Raises:
        CheckpointError: the checkpoint is incomplete, damaged, unsafe or of an unknown kind, or there is no such tokenizer.
        ValueError: a dtype or a kind of weights that parameters cannot have, a device that is not here, a revision of what is not on the hub, or a
            mesh that cannot share the model.
    """
    check_kinds(weights, embedding)
    if mesh is not None and device is not None:
        raise ValueError(f"device={device} and a mesh; give one of the two")
    mesh, device = None if mesh is None else get_mesh(mesh), _device(device)
    wanted = None if dtype is None else float_name(dtype)
    checkpoint = open_checkpoint(source, progress, revision=revision, token=token, tokenizer=tokenizer)
    if wanted is None:
        where = device if mesh is None else mesh.devices.flat[0]
        wanted = "float32" if _platform(where) == "cpu" else checkpoint.own_dtype
    kinds = kinds_of(checkpoint, weights, embedding)
    if mesh is None:
        return assemble(checkpoint, wanted, lambda _, __, read: jax.device_put(read(), device), progress, kinds)
    shard = get_shard(mesh, checkpoint.config)
    checkpoint.check()
    for name, shape in checkpoint.shapes(FLOATS[wanted], kinds).items():
        place(shard, name, shape)  # says what cannot be dealt, before anything is read
    return assemble(checkpoint, wanted, partial(place_from, shard), progress, kinds)


def open_checkpoint(
    source: str | Path | None,
    progress: bool | None = None,
    *,
    headers_only: bool = False,
    revision: str | None = None,
    token: str | bool | None = None,
    tokenizer: TokenizerSource | None = None,
) -> Checkpoint:
    """Find a checkpoint, downloading it if need be, and read its headers.

    With `headers_only`, the weights of a hub id are not downloaded; everything but reading them works. `tokenizer` is found first,
    and takes the place of the checkpoint's own.
    """
    if tokenizer is not None:
        find = find_tokenizer(tokenizer, token=token, progress=progress)
        found = open_checkpoint(source, progress, headers_only=headers_only, revision=revision, token=token)
        return dataclasses.replace(found, tokenizer=lambda: find(found.config))
    if revision is not None and (not hub.ID.fullmatch(str(source)) or expanded(str(source)).exists()):
        raise ValueError(f"revision={revision!r} is for models on the hub, which {source or default_model.NAME} is not")
    path = default_model.locate(progress) if _is_default(source) else expanded(str(source))
    try:
        if not path.exists():
            files.recover(path)  # a run that was killed while it replaced this model
        if path.suffix in PICKLES:
            refuse_pickle(path)
        if not path.exists() and hub.ID.fullmatch(str(source)):
            if headers_only:
                return hub.open_headers(str(source), revision=revision, token=token, progress=progress)
            path = hub.fetch(str(source), revision=revision, token=token, progress=progress)
        return _open(path, source)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror or error})") from error


def _open(path: Path, source: str | Path | None) -> Checkpoint:
    if path.is_dir():
        return _open_directory(path)
    if present(path):
        if path.suffix == ".safetensors":
            raise CheckpointError(
                f"{path}: a safetensors file says nothing of the model; give the directory it lies in"
            )
        return open_gguf(path)
    raise CheckpointError(
        f"{source}: no such file or directory, and not a hub id, which looks like owner/name; "
        f"the default model is {default_model.NAME}"
    )


def _device(device: Any) -> Any:
    """A device or sharding of JAX, from one, or from text such as "cpu" or "gpu:1".

    Raises:
        ValueError: it is none, or there is no such device here.
    """
    if device is None or isinstance(device, jax.Device | jax.sharding.Sharding):
        return device
    allowed = "give a device of jax.devices(), a sharding, or text such as 'cpu' or 'gpu:1'"
    if not isinstance(device, str):
        raise ValueError(f"device is {shown(device)}; {allowed}")
    platform, colon, number = device.lower().partition(":")
    if not platform or (colon and not number.isdecimal()):
        raise ValueError(f"device={short(device)}; {allowed}")
    try:
        found = jax.local_devices(backend=platform)
    except RuntimeError:
        found = []
    if int(number or 0) >= len(found):
        there = ", ".join(f"{each.platform}:{i}" for i, each in enumerate(jax.local_devices()))
        raise ValueError(f"device={short(device)} is not here; JAX has {there}")
    return found[int(number or 0)]


def float_name(dtype: Any) -> str:
    """Name of a floating-point type that parameters may have.

    Raises:
        ValueError: any other type.
    """
    try:
        name = np.dtype(dtype).name
    except TypeError:
        name = ""
    if name not in FLOATS:
        raise ValueError(f"dtype={dtype!r} is not one of {', '.join(FLOATS)}")
    return name


def _is_default(source: str | Path | None) -> bool:
    return source is None or (str(source).lower() == default_model.NAME.lower() and not Path(source).exists())


def _open_directory(path: Path) -> Checkpoint:
    if present(path / MARK):
        return open_orbax(path)
    if not present(path / "config.json") and (file := find_gguf(path)) is not None:
        return open_gguf(file)
    return open_directory(path)


def _platform(device: Any) -> str:
    if device is None:
        device = jax.numpy.zeros(()).sharding  # where arrays go by default, `jax.default_device` included
    devices = getattr(device, "device_set", {device})
    return next(iter(devices)).platform
