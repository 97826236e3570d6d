"""Results that only key holders can read, and only under the identity they were stored for.

AES-GCM with a fresh 96-bit nonce. The data is `length of key id | key id | nonce | ciphertext`; key
id, codec name and context are authenticated with it, so that a result cannot be moved to another
record or passed off as written by another codec. The stored codec name itself is not: it is the
engine that refuses a plain result in place of an encrypted one (`strict`, see `decode_result`).
Errors say nothing but that it did not work.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar, Final

from semel.core.codec import Codec, JsonCodec, check_codec
from semel.core.codec_types import outlined
from semel.core.optional import Needed
from semel.errors import ConfigError

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

KEY_LENGTHS: Final = (16, 24, 32)
NONCE_BYTES: Final = 12
KEY_ID_LIMIT: Final = 255


class EncryptedCodec:
    """Encrypts what `inner` (json) encodes: every key in `keys` decrypts, `primary` encrypts.

    To rotate: add a key and make it primary; remove the old one when its last record has expired.

    A policy with this codec replays encrypted results only: a plain one in the store raises
    `ResultUnavailable`. With `strict=False` plain results are replayed, too, so that you can switch
    encryption on while they are kept; then a process that writes to the store can forge a result.

    Examples:
        >>> codec = EncryptedCodec(keys={"2026": os.urandom(32)}, primary="2026")
        >>> Policy(codec=codec)
        Policy(codec=EncryptedCodec('aesgcm/1+json/1'))
    """

    encrypted: ClassVar[bool] = True
    """What is said of its results, in errors and in place of one, shows no part of them."""

    def __init__(
        self,
        inner: Codec | None = None,
        *,
        keys: Mapping[str, bytes],
        primary: str,
        strict: bool = True,
    ) -> None:
        self.strict = strict
        self._inner: Codec = JsonCodec() if inner is None else inner
        check_codec(self._inner, "the codec inside EncryptedCodec")
        self.name = f"aesgcm/1+{self._inner.name}"
        aes_gcm, self._invalid_tag = _cryptography()
        self._ciphers = {_key_id(name): aes_gcm(_checked(name, key)) for name, key in keys.items()}
        self._primary = _key_id(primary)
        if self._primary not in self._ciphers:
            raise ConfigError(f"the primary key {primary!r} is not among the keys")

    def __repr__(self) -> str:
        return f"EncryptedCodec({self.name!r})"

    def encode(self, value: object, context: bytes, hint: object = None) -> bytes:
        """Encode `value` with the inner codec, then encrypt with the primary key.

        `context` is bound to the result; `hint` is for the inner codec.
        """
        plain = self._inner.encode(value, context, hint)
        nonce = os.urandom(NONCE_BYTES)
        sealed = self._ciphers[self._primary].encrypt(
            nonce, plain, self._associated(self._primary, context)
        )
        return _prefixed(self._primary) + nonce + sealed

    def decode(self, data: bytes, context: bytes, hint: object = None) -> object:
        """Decrypt with the key that `data` names, then read with the inner codec.

        `context` must be that of `encode`; `hint` is for the inner codec.
        """
        key_id, nonce, sealed = _split(data)
        cipher = self._ciphers.get(key_id)
        if cipher is None:
            raise outlined("the stored result was encrypted with a key not known here")
        try:
            plain = cipher.decrypt(nonce, sealed, self._associated(key_id, context))
        except (
            self._invalid_tag,
            ValueError,
        ):  # ValueError: cut so short that not even a tag is left
            raise outlined("the stored result could not be decrypted") from None
        return self._inner.decode(plain, context, hint)

    def _associated(self, key_id: bytes, context: bytes) -> bytes:
        return _prefixed(self.name.encode()) + _prefixed(key_id) + context


def _cryptography() -> tuple[type[AESGCM], type[Exception]]:
    """Import what only encryption needs, so that the class can be imported without it."""
    with Needed("semel[encryption]", by="EncryptedCodec", error=ConfigError):
        from cryptography.exceptions import InvalidTag  # noqa: PLC0415 - see above
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM  # noqa: PLC0415
    return AESGCM, InvalidTag


def _key_id(name: str) -> bytes:
    encoded = name.encode()
    if not 0 < len(encoded) <= KEY_ID_LIMIT:
        raise ConfigError(f"a key id has 1 to {KEY_ID_LIMIT} bytes; got {len(encoded)}")
    return encoded


def _checked(name: str, key: object) -> bytes:
    if not isinstance(key, bytes):
        # Unshown: whatever it is, it may be the key.
        raise ConfigError(
            f"key {name!r} must be bytes, not {type(key).__name__}; decode a string first, as with "
            "base64.b64decode or bytes.fromhex"
        )
    if len(key) not in KEY_LENGTHS:
        raise ConfigError(f"key {name!r} has {len(key)} bytes; AES takes 16, 24 or 32")
    return key


def _prefixed(part: bytes) -> bytes:
    return bytes([len(part)]) + part


def _split(data: bytes) -> tuple[bytes, bytes, bytes]:
    start = 1 + data[0] if data else 0
    end = start + NONCE_BYTES
    return data[1:start], data[start:end], data[end:]
