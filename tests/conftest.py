"""What all tests share: quick compilation, strict JAX, checked annotations, real data where it is at hand, and a tiny model."""

import dataclasses
import gc
import itertools
import os
import signal
import tempfile
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hypothesis
import jax
import pytest
import quick_programs
import runtime_types
import tokenizers

runtime_types.install()

import tiny_model

from kvjax.models import Params

pytest_plugins = ["long_share"]

CI = os.environ.get("CI", "").lower() in ("1", "true", "yes")

# No deadline: the first example of a shape compiles. In CI the examples are the same each time.
hypothesis.settings.register_profile("local", deadline=None)
hypothesis.settings.register_profile("ci", deadline=None, derandomize=True, print_blob=True)
hypothesis.settings.load_profile("ci" if CI else "local")


# Where a shell starts tests in the background they would not be interrupted, nor would the processes that they start and interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_configure(config: pytest.Config) -> None:
    """What has to be chosen before JAX looks for devices and XLA reads its flags, which they do once.

    The device tier computes where the user's programs do. All other tests mean the CPU, whatever else the machine has.
    """
    os.environ["KVJAX_COMPILATION_CACHE"] = "0"  # what a test compiles is compiled
    if config.option.markexpr == "device":
        # Several processes share the device's memory; and files are few, so their tests are divided among processes.
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
        # Most of the time would go into compiling the candidates of each matmul, to choose the fastest.
        os.environ["XLA_FLAGS"] = f"{quick_programs.GPU_FLAGS} {os.environ.get('XLA_FLAGS', '')}"
        config.option.dist = "worksteal" if config.option.dist == "loadfile" else config.option.dist
        if len(config.option.tx or ()) == config.option.maxprocesses:
            # Most of the time goes into compiling, which a large machine does for eight processes as fast as for four.
            config.option.tx = ["popen"] * max(config.option.maxprocesses, min((os.cpu_count() or 1) // 2, 8))
        return
    os.environ["JAX_PLATFORMS"] = "cpu"  # for processes that tests start, as is the next one
    os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # a process a core: threads of torch would wait for each other
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_disable_most_optimizations", True)
    if config.option.markexpr in ("mesh", "mesh_long"):
        jax.config.update("jax_num_cpu_devices", 8)
    if config.option.markexpr != "long":
        quick_programs.use_quick_flags()
    quick_programs.leave_out_locations()
    quick_programs.share_contexts()
    if quick_programs.FOLDER not in os.environ:
        # The processes that run tests inherit it.
        kept = tempfile.TemporaryDirectory(prefix="kvjax-programs-", ignore_cleanup_errors=True)
        os.environ[quick_programs.FOLDER] = kept.name
        config.add_cleanup(lambda: (os.environ.pop(quick_programs.FOLDER), kept.cleanup()))
    quick_programs.keep_programs(Path(os.environ[quick_programs.FOLDER]))


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests of a file with the same policy run one after the other, so that each finds what the one before it compiled.

    Otherwise programs are dropped before the last test that runs them, where those of all policies together are too many.
    """
    first = dict[tuple[Path, str], int]()

    def place(indexed: tuple[int, pytest.Item]) -> int:
        index, item = indexed
        call = getattr(item, "callspec", None)
        return first.setdefault((item.path, call.id), index) if call and "policy" in call.params else index

    items[:] = [item for _, item in sorted(enumerate(items), key=place)]


def pytest_collection_finish() -> None:
    """What was imported stays, so the garbage collector need not look through it, at each time, for the rest of the run.

    Torch, transformers and the tests are most of what a process holds: to look took 6 % of the time of typical tests.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)


@pytest.fixture(autouse=True)
def optimised(request: pytest.FixtureRequest):
    """Programs are optimised where a test is marked so, for the default model, which computes for long, and on devices.

    Most tests compile many small programs and run each a few times. So they do without the backend's optimisations, which take a third
    of the time; and all but the long ones, with the version of XLA that has a choice, without its newer emitters, which take half of
    the rest.
    """
    marked = any(request.node.get_closest_marker(name) for name in ("optimised", "device"))
    usual = jax.config.read("jax_disable_most_optimizations")
    quick_programs.large = "smollm2" in request.fixturenames
    jax.config.update("jax_disable_most_optimizations", not (marked or quick_programs.large))
    yield
    jax.config.update("jax_disable_most_optimizations", usual)
    quick_programs.large = False


@pytest.fixture(scope="session", autouse=True)
def strict_jax():
    """No silent promotion of types: what is mixed is mixed on purpose."""
    with jax.numpy_dtype_promotion("strict"):
        yield


tests_run = itertools.count(1)


@pytest.fixture(autouse=True)
def room_for_programs():
    """Compiled programs are dropped when there are very many; to look takes as long as a short test."""
    yield
    if next(tests_run) % 16 == 0 and quick_programs.mappings() > quick_programs.MAPPINGS:
        quick_programs.drop_programs()


@pytest.fixture(scope="module", autouse=True)
def memory_for_programs():
    """Compiled programs are dropped at the end of a file if they take much memory."""
    yield
    if quick_programs.held_bytes() > quick_programs.MEMORY:
        quick_programs.drop_programs()


@pytest.fixture(scope="module")
def programs_by_chunk() -> defaultdict[int, dict[str, dict[Any, Any]]]:
    """Compiled programs by `decoding.CHUNK`."""
    return defaultdict(lambda: {"decode": {}, "answer": {}})


@pytest.fixture
def set_chunk(monkeypatch: pytest.MonkeyPatch, programs_by_chunk: defaultdict[int, Any]) -> Callable[[int], None]:
    """Sets `decoding.CHUNK` for a test. Compiled programs hold that number, so those of each are kept apart."""
    from kvjax.runtime import decoding

    def set_to(size: int) -> None:
        monkeypatch.setattr(decoding, "CHUNK", size)
        for name, compiled in programs_by_chunk[size].items():
            monkeypatch.setattr(getattr(decoding, name), "_compiled", compiled)

    return set_to


@pytest.fixture(scope="session")
def shared() -> Path:
    """Folder of real text and checkpoints: $KVJAX_SHARED, or `shared` beside the repository."""
    folder = Path(os.environ.get("KVJAX_SHARED") or Path(__file__).resolve().parents[2] / "shared")
    if not (folder / "data").is_dir():
        pytest.skip(f"no real data at {folder}: set KVJAX_SHARED to a folder with data/text and data/models")
    return folder


@pytest.fixture(scope="session")
def smollm2() -> Params:
    """The default model, SmolLM2-135M-Instruct, in float32."""
    from kvjax.conversion import CheckpointError, load

    try:
        return load(dtype="float32")
    except (CheckpointError, OSError) as error:
        if CI:
            raise
        pytest.skip(f"the default model cannot be had here: {error}")


@pytest.fixture(scope="session")
def tiny() -> Params:
    """A random Llama, see `tiny_model.tiny`."""
    return tiny_model.tiny()


@pytest.fixture(scope="session")
def letters(tiny: Params) -> Params:
    """The tiny model with a tokenizer: ids 0 to 61 are letters and digits, 62 is a space, 63 ends a text."""
    from kvjax.conversion import Tokenizer

    alphabet = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"
    vocabulary = {c: i for i, c in enumerate(alphabet)} | {" ": 62, "<end>": 63}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="a"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
    backend.decoder = tokenizers.decoders.Fuse()
    backend.add_special_tokens(["<end>"])
    template = "{% for m in messages %}{{ m.content }} {% endfor %}"
    tokenizer = Tokenizer(backend, eos=(63,), chat_template=template)
    return tiny.replace(tokenizer=tokenizer, config=dataclasses.replace(tiny.config, eos=(63,)))


@pytest.fixture(scope="session")
def talker(tmp_path_factory: pytest.TempPathFactory) -> Params:
    """A random Llama of window 8192 with a byte-level tokenizer and a chat template, for tasks that are given as text."""
    from checkpoints import HF_CONFIG, write_hf

    from kvjax.conversion import load

    path = tmp_path_factory.mktemp("talker") / "small"
    write_hf(path, HF_CONFIG | {"max_position_embeddings": 8192}, tokenizer=True)
    return load(path)
