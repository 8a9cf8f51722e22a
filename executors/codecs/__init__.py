"""Codecs for activations that cross a boundary: quantisation, encodings and the message that carries them.

``codec_of(codec_spec("q4:token")).encode(tensor)`` makes a message, :func:`decode` a tensor of it.
"""

from executors.codecs.codec import (
    Codec,
    Message,
    Plain,
    QuantisedCodec,
    codec_of,
    decode,
    decode_quantised,
    encode_quantised,
    encoding_of,
    messages_of,
)
from executors.codecs.quantising import Quantised, dequantise, quantise

__all__ = [
    "Codec",
    "Message",
    "Plain",
    "Quantised",
    "QuantisedCodec",
    "codec_of",
    "decode",
    "decode_quantised",
    "dequantise",
    "encode_quantised",
    "encoding_of",
    "messages_of",
    "quantise",
]
