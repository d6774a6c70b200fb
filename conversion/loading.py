"""`load`: the entry point that loads any supported checkpoint."""

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
    """Load a model. Tensors stream from the file to the device one at a time.

    Args:
        source: where the model is. None is the default model, as is its name "SmolLM2-135M-Instruct" (any letter case).
            Otherwise give a Hugging Face directory or hub id (``owner/name``), a GGUF file, or a directory that
            `convert` or `save` wrote. Of a split GGUF model, give the first file.
        dtype: type of parameters, activations and cache: float32, bfloat16 or float16. The default is float32 on CPU
            and the checkpoint's own type elsewhere (bfloat16 for quantised checkpoints).
        weights: how matrices of the layers are stored in memory.
            "float" uses `dtype`.
            "int8" is symmetric, with one scale per output.
            "int4" has groups of 32 inputs with a scale and a minimum. A matrix that the file stores in 4 bits keeps its codes.
            "as stored" keeps codes in 8 or 4 bits without loss. This covers GGUF blocks (Q4_0, Q4_1, Q5_0, Q5_1, Q8_0,
            Q2_K to Q6_K, IQ4_NL, IQ4_XS, MXFP4), MXFP4 of gpt-oss, GPTQ, AWQ, compressed-tensors, and checkpoints that
            `convert` wrote.
            None means "float" for a GGUF file and "as stored" otherwise.
        embedding: the same for embedding and head. The default is "as stored" if `weights` is, and "float" otherwise.
        tokenizer: replaces the checkpoint's tokenizer: a directory with a ``tokenizer.json``, a GGUF file, a hub id, or
            a `kvjax.conversion.Tokenizer`. The end tokens remain those of the model.
        device: jax device or sharding for the parameters, or text: a platform such as "cpu", "gpu", "cuda" or "tpu",
            optionally with an index, such as "gpu:1". None uses jax's default device. Programs run on the default
            device. To compute elsewhere, also set `jax.config.update("jax_default_device", ...)` or JAX_PLATFORMS.
        revision: branch, tag or commit of a model on the hub; None is its main branch.
        token: access token for the hub. None uses ``HF_TOKEN`` or the token of ``hf auth login``; False uses none.
        progress: whether to draw progress bars; None draws them if the error stream is a terminal.
        mesh: mesh over which parameters are sharded, as for `kvjax.Engine`, instead of `device`. Programs with these
            parameters run on the mesh. Each process reads only the parts for its own devices.

    Returns:
        The parameters, with configuration and tokenizer.

    Warns:
        UserWarning: weights are NaN or infinite, the tokenizer has tokens that the model does not know, or the
            configuration ties a head that differs from the embedding.

    Raises:
        CheckpointError: the checkpoint is incomplete, damaged, unsafe or of an unknown kind, or the tokenizer is not
            found.
        ValueError: `source` is empty, `dtype`, `weights` or `embedding` is not supported, `device` does not exist,
            `revision` is given for a model that is not on the hub, or the model cannot be sharded over `mesh`.

    Example:
        >>> params = kvjax.load("Qwen/Qwen3-0.6B", dtype="bfloat16")  # doctest: +SKIP
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     copy = kvjax.load(kvjax.save(params, f"{folder}/model"), dtype="bfloat16")
        >>> copy.embed.dtype
        dtype(bfloat16)
    """
    check_kinds(weights, embedding)
    if mesh is not None and device is not None:
        raise ValueError(f"device={device} and a mesh are both given; give one of the two")
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
        place(shard, name, shape)  # raises before any weight is read, if a parameter cannot be sharded
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
    """Find a checkpoint, downloading it if necessary, and read its headers.

    Args:
        source, revision, token, progress: as for `load`.
        headers_only: whether to download only the headers of a model on the hub. Its weights then cannot be read.
        tokenizer: replaces the checkpoint's tokenizer. It is looked up before the checkpoint.
    """
    if source == "":
        raise ValueError(
            'source="" is empty; give a path or a hub id, or None for the default model. The current directory is "."'
        )
    if tokenizer is not None:
        find = find_tokenizer(tokenizer, token=token, progress=progress)
        found = open_checkpoint(source, progress, headers_only=headers_only, revision=revision, token=token)
        return dataclasses.replace(found, tokenizer=lambda: find(found.config))
    if revision is not None and (not hub.ID.fullmatch(str(source)) or expanded(str(source)).exists()):
        raise ValueError(f"revision={revision!r} is for models on the hub, which {source or default_model.NAME} is not")
    path = default_model.locate(progress) if _is_default(source) else expanded(str(source))
    try:
        if not path.exists():
            files.recover(path)  # restores a model whose replacement was interrupted
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
                f"{path}: a safetensors file does not describe the model; give the directory that contains it"
            )
        return open_gguf(path)
    raise CheckpointError(
        f"{source}: no such file or directory, and not a hub id, which looks like owner/name; "
        f"the default model is {default_model.NAME}"
    )


def _device(device: Any) -> Any:
    """Parse a device argument: a jax device or sharding, or text such as "cpu" or "gpu:1".

    Raises:
        ValueError: the argument has another form, or there is no such device.
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
    """Name of a supported floating-point type.

    Raises:
        ValueError: the type is not supported.
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
        device = jax.numpy.zeros(()).sharding  # where arrays are placed by default, which honours `jax.default_device`
    devices = getattr(device, "device_set", {device})
    return next(iter(devices)).platform
