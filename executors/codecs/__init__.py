"""Codecs for activations that cross a boundary: quantization, encodings and the message that carries them.

``codec_of(codec_spec("q4:token")).encode(tensor)`` makes a message, :func:`decode` a tensor of it.
"""

from executors.codecs.codec import (
    Codec,
    Message,
    Plain,
    QuantizedCodec,
    codec_of,
    decode,
    decode_quantized,
    encode_quantized,
    encoding_of,
    messages_of,
)
from executors.codecs.quantizing import Quantized, dequantize, quantize

__all__ = [
    "Codec",
    "Message",
    "Plain",
    "Quantized",
    "QuantizedCodec",
    "codec_of",
    "decode",
    "decode_quantized",
    "dequantize",
    "encode_quantized",
    "encoding_of",
    "messages_of",
    "quantize",
]
