"""8-bit floats (e4m3) in Triton kernels. Kernels multiply them as float16, or as float32 if queries are float32.

Values are read as pairs of neighbouring channels. Matrix units get values by columns, for which hardware only transposes
entries of 16 bits. A pair is one such entry, and is taken apart in registers.
"""

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, UInt16

from ..float8 import FLOAT8
from ..triton import backend

SMALLEST = 1e-30
"""Smallest factor of a slot's value. Those of zeros, whose factor is 0, are replaced by it."""

_CHANNEL = """{
.reg .b32 both;
.reg .b16 low, high;
prmt.b32 both, $1, 0, %s;
mov.b32 {low, high}, both;
cvt.rn.f16x2.e4m3x2 $0, low;
}"""
"""One channel of two pairs, which are bytes 0 and 2, or 1 and 3."""


def paired(x: Float[Array, "*B H"]) -> UInt16[Array, "*B H/2"]:
    """View 8-bit floats as pairs of channels. XLA copies nothing."""
    return jax.lax.bitcast_convert_type(x.reshape(*x.shape[:-1], -1, 2), jnp.uint16)


def split(pairs: UInt16[Array, "S P"], interpret: bool) -> tuple[Float[Array, "S P"], Float[Array, "S P"]]:
    """Return the first and the second channels of pairs, in float16."""
    if interpret:
        bytes_ = ((pairs >> shift).astype(jnp.uint8) for shift in (0, 8))
        first, second = (jax.lax.bitcast_convert_type(each, FLOAT8).astype(jnp.float16) for each in bytes_)
        return first, second
    shape = [jax.ShapeDtypeStruct(pairs.shape, jnp.float16)]
    (first,), (second,) = (
        backend.elementwise_inline_asm(
            _CHANNEL % order, args=[pairs], constraints="=r,r", pack=2, result_shape_dtypes=shape
        )
        for order in ("0x4420", "0x4431")
    )
    return first, second


def log(x: Float[Array, " S"], interpret: bool) -> Float[Array, " S"]:
    """Logarithm by one instruction, with an error of about 2^-22."""
    if interpret:
        return jnp.log(x)
    shape = [jax.ShapeDtypeStruct(x.shape, jnp.float32)]
    (found,) = backend.elementwise_inline_asm(
        "lg2.approx.ftz.f32 $0, $1;", args=[x], constraints="=f,f", pack=1, result_shape_dtypes=shape
    )
    return found * math.log(2)


def in_float16(x: Float[Array, "R H"]) -> tuple[Float[Array, "R H"], Float[Array, " R"]]:
    """Multiply each row by a power of two, so that its largest magnitude is from 2^14 to 2^15.

    Returns:
        The rows in float16, and the powers of two that undo it. All but tiny numbers in bfloat16 are exact.
    """
    x = x.astype(jnp.float32)
    exponent = jax.lax.bitcast_convert_type(jnp.max(jnp.abs(x), axis=1), jnp.int32) >> 23
    exponent = jnp.maximum(exponent, 15)
    power, inverse = (jax.lax.bitcast_convert_type(each << 23, jnp.float32) for each in (268 - exponent, exponent - 14))
    return (x * power[:, None]).astype(jnp.float16), inverse
