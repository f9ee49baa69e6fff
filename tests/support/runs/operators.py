"""Two operators, and manifests that they sign."""

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from dipaco.protocol.manifest import sign_manifest, verify_manifest

from .make_plan import make_plan

KEY = Ed25519PrivateKey.from_private_bytes(b"o" * 32)


STRANGER = Ed25519PrivateKey.from_private_bytes(b"s" * 32)


def manifest(seed, start_s, successor_of=None, key=KEY):
    plan = make_plan(seed=seed, start_s=start_s, successor_of=successor_of)
    return verify_manifest(sign_manifest(plan, key))
