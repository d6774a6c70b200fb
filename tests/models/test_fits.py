"""`benchmarks.fits`: memory of Llama-3.1's shapes on TPU chips, as the TPU compiler reports it, and its result file."""

from pathlib import Path

import pytest
from kernels.ahead_of_time import chip

from benchmarks import report
from benchmarks.fits import main, measure
from kvjax.bench.case import Case
from kvjax.config import PRESETS
from kvjax.models import abstract
from kvjax.models.params import nbytes
from kvjax.runtime.absent_tpu import mesh

LAYERS = 2


def test_results_with_other_settings_are_not_overwritten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "fits.json"
    settings = {"chip": "v5e", "shape": "llama-3.1-8b", "layers": None, "dtype": "bfloat16", "block": 4096}
    report.write(out, report.header(**settings), [{"policy": "snapkv"}])
    before = out.read_bytes()
    monkeypatch.setattr("sys.argv", ["fits", "--layers", "2", "--out", str(out)])
    with pytest.raises(SystemExit, match=r"fits\.json was measured with other settings: .* give another --out"):
        main()
    assert out.read_bytes() == before


@pytest.mark.rotating
@pytest.mark.parametrize(
    ("weights", "limit", "temporaries"),
    [
        pytest.param("int8", 15.0e9, 0.65e9, marks=pytest.mark.slow),
        pytest.param("int4", 9.0e9, 0.75e9, marks=pytest.mark.long),
    ],
)
def test_128k_tokens_fit(weights: str, limit: float, temporaries: float) -> None:
    """Two layers need so little besides weights and cache that 32 fit: nothing is kept of each layer, and no floats of its matrices."""
    chip("v5e")
    case = Case("snapkv", {"budget": 8192}, 131_072, 1, "llama-3.1-8b", 256, layers=LAYERS)
    row = measure(case, weights, "int8", 4096, "v5e")
    held = row["weight_bytes"] + row["cache_bytes"]
    rest = max(row["prefill_bytes"], row["decode_bytes"]) - held
    assert rest < temporaries
    whole = nbytes(abstract(PRESETS["llama-3.1-8b"], "bfloat16", weights=weights, embedding="int8"))
    layer = 12e6  # of each, as the result file of all 32 has it
    assert whole + 32 / LAYERS * row["cache_bytes"] + rest + 32 * layer <= limit


@pytest.mark.long
@pytest.mark.parametrize(
    ("chips", "shape", "limit"),
    [
        ("v5e:2x2", "llama-3.1-8b", 15.0e9),
        ("v5p:2x2x1", "llama-3.1-70b", 90.0e9),
        ("v6e:2x4", "llama-3.1-70b", 30.0e9),
    ],
)
def test_128k_tokens_fit_several_chips(chips: str, shape: str, limit: float) -> None:
    """In bfloat16, by the same reckoning."""
    count = len(mesh(chips).devices.flat)
    case = Case("snapkv", {"budget": 8192}, 131_072, 1, shape, 256, layers=LAYERS)
    row = measure(case, "float", "float", 4096, chips)
    rest = max(row["prefill_bytes"], row["decode_bytes"]) - row["weight_bytes"] - row["cache_bytes"]
    config = PRESETS[shape]
    held = nbytes(abstract(config, "bfloat16")) / count + config.num_layers / LAYERS * row["cache_bytes"]
    assert held + rest + config.num_layers * 12e6 <= limit
    assert row["weight_bytes"] <= 1.01 * nbytes(abstract(case.config, "bfloat16")) / count
