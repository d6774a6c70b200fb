"""How other libraries pack and unpack matrices in 8 and 4 bits: their own published functions, in NumPy for torch, and nothing of kvjax."""

import numpy as np

AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]
AWQ_REVERSE_ORDER = [0, 4, 1, 5, 2, 6, 3, 7]


def gptq_pack(codes: np.ndarray, zeros: np.ndarray, bits: int, version: int = 1) -> tuple[np.ndarray, np.ndarray]:
    """AutoGPTQ 0.7.1, `qlinear_cuda_old.QuantLinear.pack`: codes [in, out] and zeros [groups, out] to qweight and qzeros; version 2 of the
    format (GPTQModel) leaves zeros as they are.
    """
    intweight = codes.astype(np.uint32)
    qweight = np.zeros((intweight.shape[0] // 32 * bits, intweight.shape[1]), dtype=np.uint32)
    i = 0
    row = 0
    while row < qweight.shape[0]:
        for j in range(i, i + (32 // bits)):
            qweight[row] |= intweight[j] << np.uint32(bits * (j - i))
        i += 32 // bits
        row += 1
    zeros = (zeros.astype(np.int64) - (version == 1)).astype(np.uint32) & np.uint32(2**bits - 1)
    qzeros = np.zeros((zeros.shape[0], zeros.shape[1] // 32 * bits), dtype=np.uint32)
    i = 0
    col = 0
    while col < qzeros.shape[1]:
        for j in range(i, i + (32 // bits)):
            qzeros[:, col] |= zeros[:, j] << np.uint32(bits * (j - i))
        i += 32 // bits
        col += 1
    return qweight.view(np.int32), qzeros.view(np.int32)


def gptq_unpack(
    qweight: np.ndarray, qzeros: np.ndarray, scales: np.ndarray, g_idx: np.ndarray, bits: int, version: int = 1
) -> np.ndarray:
    """AutoGPTQ 0.7.1, `qlinear_cuda.QuantLinear.forward`: the matrix [in, out], in float32."""
    wf = np.arange(0, 32, bits, dtype=np.uint32)[None]
    zeros = (qzeros.view(np.uint32)[:, :, None] >> wf[None]) & np.uint32(2**bits - 1)
    if version == 1:
        zeros = zeros + 1
        zeros = zeros & np.uint32(2**bits - 1)
    zeros = zeros.reshape(scales.shape)
    weight = (qweight.view(np.uint32)[:, None, :] >> wf[..., None]) & np.uint32(2**bits - 1)
    weight = weight.reshape(weight.shape[0] * weight.shape[1], weight.shape[2])
    scale = scales.astype(np.float32)
    return scale[g_idx] * (weight.astype(np.int64) - zeros[g_idx].astype(np.int64)).astype(np.float32)


def awq_pack(codes: np.ndarray) -> np.ndarray:
    """AutoAWQ 0.2.9, `WQLinear_GEMM.from_linear`: codes [rows, out], of weights or zeros, to int32 [rows, out / 8]."""
    packed = np.zeros((codes.shape[0], codes.shape[1] // 8), np.uint32)
    for col in range(codes.shape[1] // 8):
        for i in range(8):
            packed[:, col] |= codes[:, col * 8 + AWQ_ORDER[i]].astype(np.uint32) << np.uint32(i * 4)
    return packed.view(np.int32)


def awq_unpack(qweight: np.ndarray, qzeros: np.ndarray, scales: np.ndarray, group_size: int) -> np.ndarray:
    """AutoAWQ 0.2.9, `packing_utils.dequantize_gemm`: the matrix [in, out], in float32."""

    def unpack(words: np.ndarray) -> np.ndarray:
        shifts = np.arange(0, 32, 4)
        wide = (words[:, :, None] >> shifts[None, None, :]).astype(np.int8).reshape(words.shape[0], -1)
        order = np.arange(wide.shape[-1]).reshape(-1, 8)[:, AWQ_REVERSE_ORDER].reshape(-1)
        return (wide[:, order] & 15).astype(np.float32)

    iweight, izeros = unpack(qweight), unpack(qzeros)
    scales = np.repeat(scales.astype(np.float32), group_size, axis=0)
    return (iweight - np.repeat(izeros, group_size, axis=0)) * scales


def pack_to_int32(value: np.ndarray, num_bits: int, packed_dim: int = 1) -> np.ndarray:
    """compressed-tensors 0.12.2, `pack_quantized.pack_to_int32`: int8 codes, about 0, to int32."""
    offset = 1 << (num_bits - 1)
    value = (value.astype(np.int16) + offset).astype(np.uint8)
    pack_factor = 32 // num_bits
    if packed_dim == 0:
        value = value.T
    rows, cols = value.shape
    value = np.pad(value, ((0, 0), (0, -cols % pack_factor)))
    reshaped = value.reshape(rows, -1, pack_factor).astype(np.uint32)
    shifts = np.arange(pack_factor, dtype=np.uint32) * np.uint32(num_bits)
    packed = (reshaped << shifts).sum(axis=2, dtype=np.uint32).view(np.int32)
    return packed.T if packed_dim == 0 else packed


def unpack_from_int32(value: np.ndarray, num_bits: int, shape: tuple[int, int], packed_dim: int = 1) -> np.ndarray:
    """compressed-tensors 0.12.2, `pack_quantized.unpack_from_int32`."""
    pack_factor, mask = 32 // num_bits, (1 << num_bits) - 1
    if packed_dim == 1:
        unpacked = np.zeros((value.shape[0], value.shape[1] * pack_factor), np.int32)
        for i in range(pack_factor):
            unpacked[:, i::pack_factor] = (value >> (num_bits * i)) & mask
        unpacked = unpacked[:, : shape[1]]
    else:
        unpacked = np.zeros((value.shape[0] * pack_factor, value.shape[1]), np.int32)
        for i in range(pack_factor):
            unpacked[i::pack_factor, :] = (value >> (num_bits * i)) & mask
        unpacked = unpacked[: shape[0], :]
    return (unpacked - pow(2, num_bits) // 2).astype(np.int8)


def dequantize(
    x_q: np.ndarray, scale: np.ndarray, zero_point: np.ndarray | None, g_idx: np.ndarray | None
) -> np.ndarray:
    """compressed-tensors 0.12.2, `forward._process_quantization` of a group, a channel or a whole matrix, in float32."""
    wide = np.atleast_2d(scale.astype(np.float32))
    if g_idx is None:
        g_idx = np.repeat(np.arange(wide.shape[1]), x_q.shape[1] // wide.shape[1])
    dequant_value = x_q.astype(np.float32)
    if zero_point is not None:
        dequant_value = dequant_value - np.atleast_2d(zero_point)[:, g_idx].astype(np.float32)
    return dequant_value * wide[:, g_idx]
