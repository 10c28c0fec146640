"""Verify a certificate of a node, with the node's public key and nothing of scrubber: certificates.md says how and why.

    python verify_certificate.py ENVELOPE.json KEY.pem        (needs the package cryptography)

Prints what was certified. Exits with 0 if the owner of the key signed it, 1 if not, 2 if a file cannot be read.
"""

import base64
import json
import sys

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import load_pem_public_key

KIND = b"application/vnd.in-toto+json"
TYPES = ("https://in-toto.io/Statement/v1", "https://scrubber.dev/certificate/v1")


def once(pairs):
    if len(dict(pairs)) != len(pairs):
        raise ValueError("a key is in there twice")
    return dict(pairs)


def read(name):
    with open(name, "rb") as file:
        return file.read(1024 * 1024)  # of a longer file this is a part, which is no envelope and no key


def decoded(text):
    return base64.b64decode(text.translate(str.maketrans("-_", "+/")), validate=True)


def main(envelope_file, key_file):
    try:
        key = load_pem_public_key(read(key_file))
        if not isinstance(key, Ed25519PublicKey):
            raise TypeError("the key is none of Ed25519")
        envelope = json.loads(read(envelope_file).decode(), object_pairs_hook=once, parse_constant=int)  # no NaN
        kind, payload = envelope["payloadType"].encode(), decoded(envelope["payload"])
        signatures = [decoded(each["sig"]) for each in envelope["signatures"]]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError, UnsupportedAlgorithm) as error:
        return f"Cannot be read: {error!r}", 2
    for signature in signatures if kind == KIND else ():
        try:
            key.verify(signature, b"DSSEv1 %d %s %d %s" % (len(kind), kind, len(payload), payload))
            statement = json.loads(payload, object_pairs_hook=once, parse_constant=int)
            if (statement["_type"], statement["predicateType"]) == TYPES:
                return json.dumps(statement, indent=2), 0
        except (InvalidSignature, ValueError, KeyError, TypeError, RecursionError):
            continue
    return "NOT VALID: the owner of this key did not sign this as a certificate.", 1


if __name__ == "__main__":
    text, code = main(*sys.argv[1:]) if len(sys.argv) == 3 else (__doc__, 2)
    print(text, file=sys.stderr if code else sys.stdout)
    sys.exit(code)
