"""Google service accounts with keys made on the spot, and the tokens they sign."""

import base64
import hashlib
import json
import math
import random
import time
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

PublicKey = tuple[int, int]  # modulus and exponent
EMAIL = "tests@shardkeep.iam.gserviceaccount.com"
EXPONENT = 65537
SHA256_PREFIX = bytes.fromhex("3031300d060960864801650304020105000420")


def write_service_account(path: Path, token_uri: str) -> dict[str, PublicKey]:
    """Write a key file as Google gives it out; returns what a server must know to check its tokens."""
    modulus, pem = make_key()
    account = {"type": "service_account", "project_id": "tests", "private_key_id": "1", "private_key": pem}
    path.write_text(json.dumps({**account, "client_email": EMAIL, "token_uri": token_uri}))
    return {EMAIL: (modulus, EXPONENT)}


def claims(token: str, accounts: Mapping[str, PublicKey]) -> dict[str, Any] | None:
    """What a signed token (JWT) says, or None if no known account signed it or it has expired."""
    parts = token.split(".")
    if len(parts) != 3:
        return None
    said: dict[str, Any] = json.loads(_decode(parts[1]))
    if said.get("iss") not in accounts or said.get("exp", 0) < time.time():
        return None
    modulus, exponent = accounts[said["iss"]]
    size = (modulus.bit_length() + 7) // 8
    end = b"\0" + SHA256_PREFIX + hashlib.sha256(f"{parts[0]}.{parts[1]}".encode()).digest()
    signed = pow(int.from_bytes(_decode(parts[2])), exponent, modulus).to_bytes(size)
    return said if signed == b"\0\1".ljust(size - len(end), b"\xff") + end else None


@cache
def make_key() -> tuple[int, str]:
    """The modulus and the PEM text of an RSA key of 2048 bits, always the same one: it guards nothing."""
    dice = random.Random(20261116)
    p, q = _prime(dice), _prime(dice)
    d = pow(EXPONENT, -1, (p - 1) * (q - 1))
    numbers = (0, p * q, EXPONENT, d, p, q, d % (p - 1), d % (q - 1), pow(q, -1, p))
    der = _tagged(0x30, b"".join(_tagged(2, n.to_bytes(n.bit_length() // 8 + 1)) for n in numbers))
    text = base64.encodebytes(der).decode()
    return p * q, f"-----BEGIN RSA PRIVATE KEY-----\n{text}-----END RSA PRIVATE KEY-----\n"


def _prime(dice: random.Random) -> int:
    small = math.prod(range(3, 4000, 2))
    while True:
        candidate = dice.getrandbits(1024) | 3 << 1022 | 1
        if math.gcd(candidate, small) == 1 and all(pow(base, candidate - 1, candidate) == 1 for base in (2, 3, 5)):
            return candidate


def _tagged(tag: int, content: bytes) -> bytes:
    """A DER element."""
    length = len(content)
    if length < 128:
        return bytes([tag, length]) + content
    octets = length.to_bytes((length.bit_length() + 7) // 8)
    return bytes([tag, 128 | len(octets)]) + octets + content


def _decode(text: str) -> bytes:
    return base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))
