"""GPT-2's byte-level alphabet: how byte-level vocabularies spell bytes, a character each."""

from __future__ import annotations


def _byte_alphabet() -> dict[int, str]:
    """Printable Latin-1 bytes as themselves, the rest from U+0100."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    rest = [byte for byte in range(256) if byte not in printable]
    shifted = {byte: chr(256 + offset) for offset, byte in enumerate(rest)}
    return {byte: shifted.get(byte, chr(byte)) for byte in range(256)}


CHAR_OF_BYTE = _byte_alphabet()
BYTE_OF_CHAR = {char: byte for byte, char in CHAR_OF_BYTE.items()}


def name_bytes(name: str) -> bytes:
    """What a token stands for, by its name in the vocabulary."""
    try:
        return bytes([BYTE_OF_CHAR[char] for char in name])
    except KeyError:  # not spelt in the byte alphabet, so it is text as it stands
        return name.encode()
